"""Tests of the Triton kernels: on a GPU if there is one, else in Triton's interpreter."""

from tests.backends.torch.kernels.device import DEVICE

__all__ = ["DEVICE"]  # imported before any test, because it selects the interpreter before triton is imported
