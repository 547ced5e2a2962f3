"""The PyTorch backend. On the CPU it is the reference that the other backends are compared with."""
