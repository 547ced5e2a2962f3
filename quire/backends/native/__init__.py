"""The default CPU backend: a C library that runs a whole forward pass per call. Needs numpy, not torch."""
