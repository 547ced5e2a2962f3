"""Tests of the Triton kernels: on the GPU where there is one, else in Triton's interpreter."""

from tests.backends.torch.kernels.device import DEVICE

__all__ = ["DEVICE"]  # imported here, before any test, because it chooses the interpreter before triton is imported
