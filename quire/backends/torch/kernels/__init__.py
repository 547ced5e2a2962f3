"""Triton kernels of the CUDA path. Nothing else imports triton."""
