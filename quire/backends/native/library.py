"""ctypes declarations of the C library. The structures mirror csrc/quire.h field by field."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.backends.machine import is_apple_silicon
from quire.errors import QuireError, install_command

ABI = 8
GROUP = 32  # inputs of a matrix that share a scale
MAX_THREADS = 256

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_NAME = "libquire_native.dylib" if sys.platform == "darwin" else "libquire_native.so"


class NativeUnavailable(QuireError):
    """The library is missing, or cannot run on this machine."""


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
    )


class Linear(ctypes.Structure):
    _fields_ = (("parts", Matrix * 4), ("num_parts", ctypes.c_int32), ("bias", ctypes.c_void_p))


class Expert(ctypes.Structure):
    _fields_ = (("gate_up", Linear), ("down", Linear))


class Recurrence(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "decays", "dt_bias", "norm", "rows", "matrices")),
        ("num_taps", ctypes.c_int32),
        ("num_channels", ctypes.c_int32),
        ("num_key_heads", ctypes.c_int32),
        ("num_value_heads", ctypes.c_int32),
        ("key_size", ctypes.c_int32),
        ("value_size", ctypes.c_int32),
        ("is_tiled", ctypes.c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("mixer", ctypes.c_int32),
        ("qkv", Linear),
        ("o", Linear),
        ("recurrence", Recurrence),
        ("gate_up", Linear),
        ("down", Linear),
        ("experts", ctypes.POINTER(Expert)),
        ("router", ctypes.c_void_p),
        ("router_bias", ctypes.c_void_p),
        ("choice_bias", ctypes.c_void_p),
        ("expert_scales", ctypes.c_void_p),
        ("shared", Expert),
        ("shared_gate", ctypes.c_void_p),
        ("input_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("post_mlp_norm", ctypes.c_void_p),
        ("v_norm", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("query_scales", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("has_window_blocks", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("rotary_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("is_key_value", ctypes.c_int32),
        ("is_shared", ctypes.c_int32),
        ("has_gate", ctypes.c_int32),
        ("is_norm_of_width", ctypes.c_int32),
        ("is_half_attention", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_chosen", ctypes.c_int32),
        ("has_sigmoid", ctypes.c_int32),
        ("renormalizes", ctypes.c_int32),
        ("experts_scale", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("attention_softcap", ctypes.c_float),
        ("residual_scale", ctypes.c_float),
        ("output_scale", ctypes.c_float),
        ("post_dense_norm", ctypes.c_void_p),
        ("post_experts_norm", ctypes.c_void_p),
        ("experts_norm", ctypes.c_void_p),
        ("router_norm", ctypes.c_void_p),
        ("ple_gate", Linear),
        ("ple_proj", Linear),
        ("ple_norm", ctypes.c_void_p),
    )


class Refine(ctypes.Structure):
    """Number of steps of 4, out of 256, that get 8 additional bits, for the input of each product."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("qkv", "o", "gate_up", "down", "head"))


class Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("logit_scale", ctypes.c_float),
        ("logit_softcap", ctypes.c_float),
        ("layers", ctypes.POINTER(Layer)),
        ("norm", ctypes.c_void_p),
        ("embedding", Linear),
        ("head", Linear),
        ("ple_embedding", Linear),
        ("ple_proj", Linear),
        ("ple_norm", ctypes.c_void_p),
        ("ple_size", ctypes.c_int32),
        ("ple_scale", ctypes.c_float),
        ("ple_proj_scale", ctypes.c_float),
        ("refine", Refine),
        ("block_size", ctypes.c_int32),
    )


class BatchArgs(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("num_logits", ctypes.c_int32),
        ("table_stride", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("first_rows", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("window_tables", ctypes.c_void_p),
        ("kv_starts", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("first_segments", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("is_sound", ctypes.c_void_p),
    )


@cache
def load_library() -> ctypes.CDLL:
    """Load the library that the build puts beside this file, or the one that QUIRE_NATIVE_LIBRARY names."""
    path = Path(os.environ.get("QUIRE_NATIVE_LIBRARY") or Path(__file__).with_name(_NAME))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        name, packages = ("mlx", "mlx mlx-lm") if is_apple_silicon() else ("torch", "torch")
        raise NativeUnavailable(
            f"the native backend's library {path.name} cannot be loaded ({error}). Installing quire from source builds"
            f" it with gcc or clang; a wheel contains it. The {name} backend does not need it:"
            f" {install_command(packages)}"
        ) from None
    _declare(library)
    if (abi := library.quire_abi()) != ABI:
        raise NativeUnavailable(f"{path} belongs to another quire (interface {abi}, not {ABI}): reinstall quire")
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    model, batch, linear, matrix = (ctypes.POINTER(one) for one in (Model, BatchArgs, Linear, Matrix))
    signatures: dict[str, tuple[object, list[object]]] = {
        "quire_abi": (integer, []),
        "quire_open": (pointer, [integer]),
        "quire_close": (None, [pointer]),
        "quire_use_threads": (integer, [pointer, integer]),
        "quire_num_threads": (integer, [pointer]),
        "quire_kernels": (ctypes.c_char_p, []),
        "quire_choose_kernels": (integer, [ctypes.c_char_p]),
        "quire_list_kernels": (ctypes.c_char_p, []),
        "quire_forward": (integer, [pointer, model, batch]),
        "quire_logits": (integer, [pointer, model, pointer, integer, pointer]),
        "quire_project": (integer, [pointer, linear, pointer, integer, integer, pointer]),
        "quire_copy_blocks": (None, [model, integer, pointer, integer]),
        "quire_purge_blocks": (None, [model, integer, pointer, integer]),
        "quire_block_bytes": (size, [integer, integer, integer]),
        "quire_packed_bytes": (size, [integer, integer, integer]),
        "quire_source_kind": (integer, [integer]),
        "quire_pack": (None, [integer, pointer, integer, integer, pointer]),
        "quire_unpack": (None, [matrix, integer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def kernels_in_use() -> str:
    """Return the name of the kernel variant that runs on this machine."""
    return str(load_library().quire_kernels().decode())


def kernels_available() -> list[str]:
    """Return all variants that this machine can run, best first."""
    return str(load_library().quire_list_kernels().decode()).split(",")


def choose_kernels(name: str) -> None:
    if load_library().quire_choose_kernels(name.encode()):
        raise NativeUnavailable(f"kernels = {name!r} is not one of those this machine runs: {kernels_available()}")
