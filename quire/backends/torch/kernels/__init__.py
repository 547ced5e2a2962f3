"""Triton kernels of the CUDA path. Only these and what compiles them import triton."""
