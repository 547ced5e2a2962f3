"""Tries every causal model type of `transformers` in a small size and prints a line for each.

python -m tests.backends.torch.hf_survey [MODEL_TYPE ...]
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch

from quire.errors import QuireError
from tests.backends.torch.hf_architectures import BOUND, EagerReference, largest_error, load_tiny, write_model
from tests.backends.torch.hf_rig import ModelRig


def try_type(model_type: str) -> str:
    """Return "equal", or why the type does not run."""
    with tempfile.TemporaryDirectory() as name:
        try:
            model = write_model(Path(name), model_type)
        except Exception as error:
            return f"not tried: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        try:
            rig = ModelRig(load_tiny(Path(name)))
        except QuireError as error:
            return str(error).replace(f"{name}: ", "").replace(f"{name}/config.json: ", "")
        largest = largest_error(EagerReference(model), rig)
        return "equal" if largest < BOUND else f"DIFFERS by {largest:.2g}"


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for model_type in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            print(f"{model_type}: {try_type(model_type)}", flush=True)
        except Exception as error:
            print(f"{model_type}: FAILS: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
