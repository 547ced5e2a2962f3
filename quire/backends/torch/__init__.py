"""The PyTorch backend. On the CPU it is the reference the other backends are judged by."""
