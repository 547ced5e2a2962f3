"""The layout of the pools of both torch runners, and the pools on a CPU as bytes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from quire.backends.block_io import Bytes, Pools, layout_text, model_key
from quire.backends.torch.forward_pass import Model
from quire.backends.torch.kv_store import KVStore
from quire.weights.spec import OTHER

LAYOUT = 1  # version of the bytes of blocks and states; raise it when their meaning changes


def torch_layout(kind: str, model: Model, store: KVStore, max_model_len: int) -> str:
    """`kind`: the equations that fill the pools. Those of other versions and devices round in other ways."""
    return layout_text(
        "torch",
        LAYOUT,
        libraries=_libraries(model),
        device=_arithmetic_of(store.device),
        kind=kind if kind != "fused" else f"fused-{_triton_version()}",
        kv=_stored_type(store),
        block_size=store.block_size,
        window=max(store.windows, default=0),
        model=model_key(model.spec, model.kv_spec.within(max_model_len), max_model_len),
    )


def _arithmetic_of(device: torch.device) -> str:
    """The kind of a device, as libraries and compilers choose kernels by it."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda-{major}.{minor}"
    return f"{device.type}-{torch.backends.cpu.get_cpu_capability()}"


def _libraries(model: Model) -> str:
    """The versions of the libraries that have the equations."""
    of_model = [version("transformers")] if model.spec.family == OTHER else []
    return ",".join([torch.__version__, *of_model])


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:  # the kernels are interpreted
        return "none"


def _stored_type(store: KVStore) -> str:
    """Return how keys and values are stored. Those in FP8 also depend on the type that they are computed in."""
    dtype = str(store.dtype).removeprefix("torch.")
    return f"{store.kv_dtype}-of-{dtype}" if store.is_fp8 else dtype


def host_pools(store: KVStore) -> Pools:
    """Return the pools of each kind of memory on a CPU."""
    full = [_bytes(pool) for shape, pool in store.all_pools() if not shape.window]
    window = [_bytes(pool) for shape, pool in store.all_pools() if shape.window]
    return full, window, [_bytes(pool[None]) for pool in store.state_pools()]


def _bytes(pool: Tensor) -> Bytes:
    """View [layers, pieces, ...] as [layers, pieces, bytes]."""
    return pool.view(pool.shape[0], pool.shape[1], -1).view(torch.uint8).numpy()
