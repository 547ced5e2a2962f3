"""Triton's interpreter, as the tests of kernels use it, computes the same bits as it is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.backends.torch import operations_child
from tests.backends.torch.kernels.device import DEVICE


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about infinite numbers
@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels run on the GPU")
def test_remembered_operations_have_the_results_of_the_interpreter() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.backends.torch.operations_child"], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    expected = json.loads(child.stdout)
    found = operations_child.results()
    assert {name for name in expected if found[name] != expected[name]} == set()
    assert all(len(set(rounds)) > 1 for rounds in expected.values())  # each round has other numbers
