"""The CPU backend people use: a C library that runs a whole forward pass per call. Needs numpy, no torch."""
