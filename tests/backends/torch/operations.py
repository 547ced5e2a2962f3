"""Remembers what the language's operations do with operands of given types, for Triton's interpreter.

It derives the types of each operation again, in ten to twenty calls of functions around one call of numpy. Here the
first operation with operands of given types, and given numbers, runs as before, and what it calls is recorded. Further
ones call numpy directly. An operation that numpy cannot do alone, such as one with bf16, always runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Array = np.ndarray[Any, Any]
Builder = interpreter.InterpreterBuilder
Tensor = tl.core.tensor
Handle = interpreter.TensorHandle

OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift"),
    *("gt", "ge", "lt", "le", "eq", "ne"),
)
REFLECTED = {name for name in OPERATORS if name[0] == "r" and name != "rshift"}
# Types whose numbers numpy has, so that it converts them as the interpreter does.
PLAIN = {"int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64"}


class Call(NamedTuple):
    """A call of the builder: what it computes of which arrays, and its result."""

    compute: Callable[..., Array]
    operands: tuple[Array, ...]
    result: Any


class Records:
    """Calls of the builder while an operation is learned."""

    def __init__(self) -> None:
        self.is_learning = False
        self.calls: list[Call] = []
        self.num_casts = 0

    @contextmanager
    def learning(self) -> Iterator[None]:
        assert not self.is_learning, "operations are not nested"
        self.calls, self.num_casts, self.is_learning = [], 0, True
        try:
            yield
        finally:
            self.is_learning = False

    def only_call(self, result: Any, sources: tuple[object, ...]) -> Call | None:
        """Return the call that made a result of operands that were converted by numpy at most once each."""
        if len(self.calls) != 1 or not isinstance(result, Tensor) or self.calls[0].result is not result.handle:
            return None
        call = self.calls[0]
        if is_pointer(result) and not is_pointer(sources[0]):  # the builder takes the pointer first
            return None
        tensors = [(one, data) for one, data in zip(sources, call.operands, strict=True) if isinstance(one, Tensor)]
        num_changed = sum(one.handle.data.dtype != data.dtype for one, data in tensors)
        is_plain = all(one.type.scalar.name in PLAIN or is_pointer(one) for one, _ in tensors)
        return call if self.num_casts == 0 or (is_plain and self.num_casts <= num_changed) else None


def is_pointer(operand: Any) -> bool:
    return isinstance(operand, Tensor) and isinstance(operand.type.scalar, tl.core.pointer_type)


RECORDS = Records()


def new_tensor(data: Array, element: Any, kind: Any) -> Any:
    return Tensor(Handle(data, element), kind)


def key_of(operand: Any) -> object:
    """What a tensor or number has in common with others with which the same is done."""
    if type(operand) is Tensor:
        return operand.type.name
    if type(operand) is tl.core.constexpr:
        operand = operand.value
    return (type(operand), operand if type(operand) is int else repr(operand))


class Elementwise:
    """One call of numpy, with the types of its operands and of its result."""

    def __init__(self, call: Call, sources: tuple[Any, ...], result: Any) -> None:
        self._compute = call.compute
        self._element, self._type = result.handle.dtype, result.type
        self._dtype = result.handle.data.dtype
        self._sources = [
            (number, source.handle.data.dtype, None if source.handle.data.dtype == operand.dtype else operand.dtype)
            for number, (source, operand) in enumerate(zip(sources, call.operands, strict=True))
            if type(source) is Tensor
        ]
        # A number takes part as an array of one element: numpy broadcasts it.
        self._operands = [
            None if type(s) is Tensor else o.reshape(-1)[:1] for s, o in zip(sources, call.operands, strict=True)
        ]

    def __call__(self, *sources: Any) -> Any:
        """Return the result, or None if operands have other types than before."""
        operands: list[Any] = self._operands.copy()
        for number, dtype, converted in self._sources:
            data = sources[number].handle.data
            if data.dtype is not dtype:
                return None
            operands[number] = data if converted is None else data.astype(converted)
        data = self._compute(*operands)
        if data.dtype is not self._dtype:
            data = data.astype(self._dtype)
        return new_tensor(data, self._element, self._type)


def remembering_operator(operate: Any, is_reflected: bool) -> Any:
    known: dict[object, Elementwise | None] = {}

    def operator(self: Any, other: Any) -> Any:
        key = (self.type.name, key_of(other))
        if key in known:
            found = known[key]
            result = None if found is None else found(other, self) if is_reflected else found(self, other)
            return operate(self, other) if result is None else result
        sources = (other, self) if is_reflected else (self, other)
        with RECORDS.learning():
            result = operate(self, other)
        call = RECORDS.only_call(result, sources)
        known[key] = None if call is None else Elementwise(call, sources, result)
        return result

    return operator


def remembering_where(where: Any) -> Any:
    known: dict[object, Elementwise | None] = {}

    def choose(condition: Any, x: Any, y: Any) -> Any:
        if type(condition) is not Tensor:
            return where(condition, x, y)
        key = (condition.type.name, key_of(x), key_of(y))
        if key in known:
            found = known[key]
            result = None if found is None else found(condition, x, y)
            return where(condition, x, y) if result is None else result
        with RECORDS.learning():
            result = where(condition, x, y)
        call = RECORDS.only_call(result, (condition, x, y))
        known[key] = None if call is None else Elementwise(call, (condition, x, y), result)
        return result

    return choose


def remembering_cast(cast: Any) -> Any:
    known: dict[object, tuple[Any, Any, Any] | None] = {}

    def converted(self: Any, dtype: Any, *options: Any, **more: Any) -> Any:
        name = getattr(dtype, "name", None)
        if options or more or name is None:
            return cast(self, dtype, *options, **more)
        kind = self.type
        if name == kind.scalar.name:
            return self
        found = known.get((kind.name, name))
        if found is not None:
            return new_tensor(self.handle.data.astype(found[0]), found[1], found[2])
        result = cast(self, dtype)
        # fp16 goes to other types by way of fp32.
        if kind.scalar.name in PLAIN and name in PLAIN - {"int1"} and (kind.scalar.name != "fp16" or name == "fp32"):
            known[kind.name, name] = (result.handle.data.dtype, result.handle.dtype, result.type)
        return result

    return converted


def remembering_index(index: Any) -> Any:
    """Return the index of tensors by `:` and None."""
    known: dict[object, Any] = {}
    every = slice(None)

    def indexed(self: Any, slices: Any) -> Any:
        parts = slices if type(slices) is tuple else (slices,)
        kind = self.type
        if not isinstance(kind, tl.core.block_type) or not all(
            part is None or (type(part) is slice and part == every) for part in parts
        ):
            return index(self, slices)
        key = (kind.name, *(part is None for part in parts))
        if key not in known:
            known[key] = index(self, slices).type
        return new_tensor(self.handle.data[parts], self.handle.dtype.scalar, known[key])

    return indexed


def filled(data: Array, shape: tuple[int, ...]) -> Array:
    """Return an array of that shape, as `np.broadcast_to` but in a fraction of its time."""
    if data.shape == shape:
        return data
    result = np.empty(shape, data.dtype)
    result[...] = data
    return result


class Load(NamedTuple):
    shape: tuple[int, ...]
    mask: Array | None  # of a load without one
    other: Array
    dtype: Any
    element: Any
    type: Any


def remembering_load(load: Any) -> Any:
    known: dict[object, Load | None] = {}

    def loaded(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
        if type(other) is Tensor or not is_pointer(pointer) or (mask is not None and type(mask) is not Tensor):
            return load(pointer, mask, other, **options)
        key = (pointer.type.name, None if mask is None else mask.type.name, key_of(other))
        if key not in known:
            with RECORDS.learning():
                result = load(pointer, mask, other, **options)
            known[key] = _load(pointer, mask, result)
            return result
        found = known[key]
        if found is None:
            return load(pointer, mask, other, **options)
        chosen = found.mask if mask is None else filled(mask.handle.data, found.shape)
        data = interpreter._interpreter.load(pointer.handle.data, chosen, found.other, found.dtype)
        return new_tensor(data, found.element, found.type)

    return loaded


def _load(pointer: Any, mask: Any, result: Any) -> Load | None:
    shape = pointer.handle.data.shape
    calls = RECORDS.calls
    if len(calls) != 1 or calls[0].result is not result.handle or result.handle.data.shape != shape:
        return None
    _, chosen, other = calls[0].operands
    dtype = result.handle.data.dtype
    return Load(shape, chosen if mask is None else None, other, dtype, result.handle.dtype, result.type)


def remembering_store(store: Any) -> Any:
    known: dict[object, tuple[Any, Any, tuple[int, ...], Any, Any] | None] = {}

    def stored(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if not (type(pointer) is type(value) is Tensor) or (mask is not None and type(mask) is not Tensor):
            return store(pointer, value, mask, **options)
        key = (pointer.type.name, value.type.name, None if mask is None else mask.type.name)
        found = known.get(key)
        data = value.handle.data
        if found is not None and data.dtype is found[0]:
            _, dtype, shape, chosen, result = found
            data = filled(data if dtype is None else data.astype(dtype), shape)
            chosen = filled(mask.handle.data, shape) if mask is not None else chosen
            interpreter._interpreter.store(pointer.handle.data, data, chosen)
            return result
        with RECORDS.learning():
            result = store(pointer, value, mask, **options)
        if len(RECORDS.calls) == 1:
            ptrs, written, chosen = RECORDS.calls[0].operands
            is_same = data.dtype == written.dtype and not RECORDS.num_casts
            is_cast = (
                RECORDS.num_casts == 1 and value.type.scalar.name in PLAIN and _target(pointer) in PLAIN - {"int1"}
            )
            if ptrs.shape == pointer.handle.data.shape and (is_same or is_cast):
                dtype = None if is_same else written.dtype
                known[key] = (data.dtype, dtype, ptrs.shape, chosen if mask is None else None, result)
        return result

    return stored


def _target(pointer: Any) -> str:
    return str(pointer.type.scalar.element_ty.name)


def remembering_arange(arange: Any) -> Any:
    known: dict[tuple[object, object], Any] = {}

    def ranged(start: Any, end: Any) -> Any:
        key = (key_of(start), key_of(end))
        if key not in known:
            known[key] = arange(start, end)
        return known[key]

    return ranged


def remembering_numbers(to_tensor: Any) -> Any:
    known: dict[object, Any] = {}

    def converted(self: Any, x: Any, check_type: bool = True) -> Any:
        if type(x) is Tensor:
            return x
        if type(x) not in (int, float, bool):
            return to_tensor(self, x, check_type)
        key = key_of(x)
        if key not in known:
            known[key] = to_tensor(self, x, check_type)
        return known[key]

    return converted


def remembering_floats(convert: Any) -> Any:
    """Convert all numbers of a type of 8 or 16 bits once; rounding of fp32 to bf16 is a shift of its bits."""
    tables: dict[tuple[str, str, Any], Array] = {}

    def converted(data: Array, source: Any, target: Any, rounding: Any) -> Any:
        bits = source.primitive_bitwidth
        if bits <= 16:
            key = (source.name, target.name, rounding)
            codes: Any = np.uint8 if bits == 8 else np.uint16
            if key not in tables:
                tables[key] = convert(np.arange(2**bits, dtype=codes), source, target, rounding)
            return tables[key][data.view(codes)]
        if source.name == "fp32" and target.name == "bf16" and rounding is None:
            whole = data.view(np.uint32)
            is_small = (whole & 0x7F800000) == 0
            if not (is_small & ((whole & 0x7FFFFF) != 0)).any():  # no subnormal numbers
                return (whole >> 16).astype(np.uint16)
        return convert(data, source, target, rounding)

    return converted


def _recorded(method: Any, compute_of: Callable[..., Callable[..., Array]]) -> Any:
    """Return a method of the builder that records what it computes while an operation is learned."""

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        if not RECORDS.is_learning:
            return method(self, *args, **options)
        operands = tuple(arg.data for arg in args if isinstance(arg, Handle))
        result = method(self, *args, **options)
        RECORDS.calls.append(Call(compute_of(*args), operands, result))
        return result

    return recorded


def _add_to_pointer(pointer: Any, _offset: Any) -> Callable[..., Array]:
    width = np.uint64(max(1, pointer.get_element_ty().primitive_bitwidth // 8))

    def add(one: Array, other: Array) -> Array:
        places: Array = one + width * other.astype(np.uint64)
        return places

    return add


def _divide(one: Array, other: Array) -> Array:
    whole: Array = (one - np.fmod(one, other)) // other
    return whole


def _counted_cast(cast: Any) -> Any:
    def counted(self: Any, *args: Any) -> Any:
        RECORDS.num_casts += 1
        return cast(self, *args)

    return counted


def _recorded_load(load: Any) -> Any:
    def recorded(self: Any, ptrs: Any, mask: Any, other: Any, *options: Any, **more: Any) -> Any:
        result = load(self, ptrs, mask, other, *options, **more)
        if RECORDS.is_learning:
            default = np.zeros(ptrs.data.shape, result.data.dtype) if other is None else other.data
            RECORDS.calls.append(Call(np.positive, (ptrs.data, mask.data, default), result))
        return result

    return recorded


def _recorded_store(store: Any) -> Any:
    def recorded(self: Any, ptrs: Any, value: Any, mask: Any, *options: Any) -> Any:
        if RECORDS.is_learning:
            RECORDS.calls.append(Call(np.positive, (ptrs.data, value.data, mask.data), None))
        return store(self, ptrs, value, mask, *options)

    return recorded


def replacements() -> list[tuple[Any, str, Any]]:
    """Return attributes of the language and the interpreter, and what to set them to. The language must be patched."""
    builder: list[tuple[Any, str, Any]] = [
        (Builder, "binary_op", _recorded(Builder.binary_op, lambda _left, _right, compute: compute)),
        (Builder, "ternary_op", _recorded(Builder.ternary_op, lambda _a, _b, _c, compute: compute)),
        (Builder, "create_addptr", _recorded(Builder.create_addptr, _add_to_pointer)),
        (Builder, "create_idiv", _recorded(Builder.create_idiv, lambda *_: _divide)),
        (Builder, "cast_impl", _counted_cast(Builder.cast_impl)),
        (Builder, "create_fp_to_fp", _counted_cast(Builder.create_fp_to_fp)),
        (Builder, "create_masked_load", _recorded_load(Builder.create_masked_load)),
        (Builder, "create_masked_store", _recorded_store(Builder.create_masked_store)),
        (interpreter, "_convert_float", remembering_floats(interpreter._convert_float)),
        (Handle, "__post_init__", lambda _self: None),  # which checks types that are remembered
        (TritonSemantic, "to_tensor", remembering_numbers(TritonSemantic.to_tensor)),
    ]
    operators = [
        (Tensor, f"__{name}__", remembering_operator(getattr(Tensor, f"__{name}__"), name in REFLECTED))
        for name in OPERATORS
    ]
    functions: list[tuple[Any, str, Any]] = [
        (Tensor, "to", remembering_cast(Tensor.to)),
        (Tensor, "__getitem__", remembering_index(Tensor.__getitem__)),
    ]
    for name, remembering in (
        ("where", remembering_where),
        ("load", remembering_load),
        ("store", remembering_store),
        ("arange", remembering_arange),
    ):
        functions += [(tl, name, remembering(getattr(tl, name)))]
    return builder + operators + functions
