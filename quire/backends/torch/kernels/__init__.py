"""Triton kernels of the CUDA path. Only these modules and `kernel_compilation` import triton."""
