"""Replaces `mx.fast.metal_kernel` and `mx.fast.cuda_kernel` on a machine without a GPU.

The kernel's source is compiled as C++ with `gpu_on_cpu.h` and run on the CPU. The function around it is generated as
MLX generates it, from the names and types of the arrays and from the attributes that the source mentions.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

HEADER = Path(__file__).with_suffix(".h")
C_TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.int32: "int32_t"}
# Attributes of Metal that MLX passes, and their values here.
ATTRIBUTES = {
    "thread_index_in_simdgroup": ("uint", "gpu_on_cpu::current->index % gpu_on_cpu::NUM_LANES"),
    "simdgroup_index_in_threadgroup": ("uint", "gpu_on_cpu::current->index / gpu_on_cpu::NUM_LANES"),
    "threadgroup_position_in_grid": ("uint3", "gpu_on_cpu::group"),
    "threadgroups_per_grid": ("uint3", "gpu_on_cpu::num_groups"),
}
MAX_CONSTANT_SIZE = 8  # smaller arrays are constants in Metal
WARNINGS = ["-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-local-typedefs", "-Wno-deprecated-declarations"]
FLAGS = ["-std=c++17", "-O1", *WARNINGS, "-fPIC", "-shared"]


def kernel(
    *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
) -> Callable[..., list[mx.array]]:
    """Return a function like the one that MLX returns."""

    def run(
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        assert all(size % group == 0 for size, group in zip(grid, threadgroup, strict=True)), "no partial thread groups"
        assert threadgroup[1:] == (1, 1)
        text = function(name, input_names, inputs, output_names, output_dtypes, template, source, header)
        memory = [in_numpy(array) for array in inputs]
        results = [
            np.full(shape, 77, np.uint16 if dtype == mx.bfloat16 else numpy_type(dtype))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        groups = (ctypes.c_uint * 3)(*(size // group for size, group in zip(grid, threadgroup, strict=True)))
        shapes = [np.array(array.shape, np.int32) for array in inputs]
        compiled(text).launch(groups, threadgroup[0], addresses(memory), addresses(shapes), addresses(results))
        return [
            mx.array(result).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(result)
            for result, dtype in zip(results, output_dtypes, strict=True)
        ]

    return run


def function(
    name: str,
    input_names: Sequence[str],
    inputs: Sequence[mx.array],
    output_names: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
    source: str,
    header: str,
) -> str:
    """Return a C++ file with the kernel and a function that launches it."""
    parameters: list[tuple[str, str]] = []  # and their arguments
    for i, (input_name, array) in enumerate(zip(input_names, inputs, strict=True)):
        space = "constant" if array.size < MAX_CONSTANT_SIZE else "device"
        c_type = C_TYPES[array.dtype]
        parameters.append((f"const {space} {c_type}* {input_name}", f"static_cast<const {c_type}*>(inputs[{i}])"))
        if f"{input_name}_shape" in source:
            parameters.append((f"const constant int* {input_name}_shape", f"shapes[{i}]"))
    for i, (output_name, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        c_type = C_TYPES[dtype]
        parameters.append((f"device {c_type}* {output_name}", f"static_cast<{c_type}*>(outputs[{i}])"))
    for attribute, (c_type, value) in ATTRIBUTES.items():
        if attribute in source:
            parameters.append((f"{c_type} {attribute}", value))
    constants = "".join(
        f"using {key} = {C_TYPES[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"constexpr {'bool' if isinstance(value, bool) else 'int'} {key} = {int(value)};\n"
        for key, value in template
    )
    return f"""
#include "{HEADER}"
{header}
void {name}({", ".join(declaration for declaration, _ in parameters)}) {{
{constants}{source}
}}
void **inputs, **outputs;
int** shapes;
extern "C" void launch(const uint* groups, int threads, void** new_inputs, int** new_shapes, void** new_outputs) {{
    inputs = new_inputs, shapes = new_shapes, outputs = new_outputs;
    gpu_on_cpu::launch(groups, threads, [] {{ {name}({", ".join(argument for _, argument in parameters)}); }});
}}
"""


def in_numpy(array: mx.array) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def numpy_type(dtype: mx.Dtype) -> np.dtype[Any]:
    return np.array(mx.zeros(1, dtype)).dtype


def addresses(arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


@functools.cache
def compiled(text: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp")
        source.write_text(text)
        library = source.with_suffix(".so")
        command = ["g++", *FLAGS, "-o", str(library), str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"the kernel does not compile: {result.stderr}")
        return ctypes.CDLL(str(library))
