"""Makes Triton's interpreter faster: it derives types and patches the language again for every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.backends.torch import operations


@contextmanager
def faster_interpreter(checks_overflow: bool) -> Iterator[None]:
    """Patch the interpreter. Nothing else in the process may use the language meanwhile.

    `checks_overflow`: whether 32-bit integers that overflow fail a kernel. Then operations are not remembered
    (tests/backends/torch/operations.py), and all takes twice the time.
    """
    block_type, tensor = tl.core.block_type, tl.core.tensor
    patched = [
        (interpreter, "_patch_lang"),
        (interpreter, "_get_np_dtype"),
        (block_type, "__init__"),
        (tensor, "__init__"),
        (TritonSemantic, "binary_op_type_checking_impl"),
        (TritonSemantic, "broadcast_impl_value"),
        (TritonSemantic, "binary_op_sanitize_overflow_impl"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name in patched]
    patch_attr = interpreter._patch_attr
    interpreter._patch_attr = _calling_directly
    # It patches the language for every launch and every call inside a kernel: once is enough.
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_attr = patch_attr
    unpatched: Any = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda _fn: unpatched
    interpreter._get_np_dtype = _remembering_dtypes(interpreter._get_np_dtype)
    block_type.__init__ = _remembering_blocks(block_type.__init__)
    tensor.__init__ = _init_tensor
    semantic: Any = TritonSemantic
    semantic.binary_op_type_checking_impl = _remembering_operands(semantic.binary_op_type_checking_impl)
    semantic.broadcast_impl_value = _remembering_operands(semantic.broadcast_impl_value)
    if not checks_overflow:
        semantic.binary_op_sanitize_overflow_impl = lambda *_: None
        for owner, name, replacement in operations.replacements():
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in reversed(before):
            setattr(owner, name, original)
        scope.restore()


def _calling_directly(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """Patch a function of the language as the interpreter does, with one call less."""
    call = getattr(member, "__wrapped__", member)

    def called(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return call(*args, **options)

    scope.set_attr(owner, name, called)


def _remembering_dtypes(find: Any) -> Any:
    known: dict[str, Any] = {}

    def find_dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.core.block_type) else kind
        if isinstance(element, tl.core.pointer_type):
            return np.dtype(np.uint64)
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    return find_dtype


def _remembering_blocks(init: Any) -> Any:
    known: dict[tuple[int, tuple[int, ...]], tuple[Any, dict[str, Any]]] = {}  # holds the element, so that its id stays

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.core.constexpr) else size for size in shape)
        found = known.get((id(element_ty), sizes))
        if found is None:
            init(self, element_ty, shape)
            self.constants = _constants(self.shape, self.numel)
            found = known[id(element_ty), sizes] = (element_ty, dict(self.__dict__))
        self.__dict__.update(found[1])

    return init_block


def _constants(shape: Any, numel: int) -> tuple[Any, Any]:
    """Return the shape and size in the form that tensors need."""
    return tl.core.tuple([tl.core.constexpr(size) for size in shape]), tl.core.constexpr(numel)


_SCALAR = _constants((), 1)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = getattr(type, "constants", _SCALAR)


Convert = Callable[[Any], Any]


def _remembering_operands(convert: Any) -> Any:
    """Operands of the same types, and the same numbers, become operands of the same types and shapes."""
    known: dict[tuple[object, ...], tuple[Convert, Convert] | None] = {}

    def convert_operands(self: Any, lhs: Any, rhs: Any, *options: Any, **more: Any) -> tuple[Any, Any]:
        key = (operations.key_of(lhs), operations.key_of(rhs), options, *more.values())
        found = known.get(key)
        if found is not None:
            return found[0](lhs), found[1](rhs)
        results = convert(self, lhs, rhs, *options, **more)
        if key not in known:
            left, right = map(_conversion, (lhs, rhs), results)
            known[key] = None if left is None or right is None else (left, right)
        return results  # type: ignore[no-any-return]

    return convert_operands


def _conversion(operand: Any, result: Any) -> Convert | None:
    """Return what makes a result like this one of an operand like this one, or None if numpy cannot."""
    if operand is result:
        return lambda other: other
    if not isinstance(operand, tl.core.tensor):
        return lambda _number: result
    if (
        not {operand.type.scalar.name, result.type.scalar.name} <= operations.PLAIN
        and operand.type.scalar != result.type.scalar
    ):
        return None
    type, element, dtype, shape = result.type, result.handle.dtype, result.handle.data.dtype, result.handle.data.shape

    def converted(other: Any) -> Any:
        data = np.broadcast_to(other.handle.data.astype(dtype, copy=False), shape)
        return tl.core.tensor(interpreter.TensorHandle(data, element), type)

    return converted
