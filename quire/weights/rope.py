"""Scaled rotary embeddings as divisors of the frequencies, one per pair, equal to those of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.fields import Fields, show
from quire.weights.spec import RopeSpec

MAX_CONTEXT = 1 << 24
MIN_THETA = 1e-3  # smaller values overflow in the power and make no sense
MAX_THETA = 1e12
MIN_FACTOR = 1e-3  # factors are divisors
MAX_FACTOR = 1e6


def scaled_rope(scaling: Fields, theta: float, rotary_size: int, max_model_len: int) -> RopeSpec:
    """Make a rope. `scaling` is in config.json's form: a type, its parameters, and the context it was trained for."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in SCALINGS:
        can = ", ".join(SCALINGS)
        raise UnsupportedModel(f"{scaling.source}: rope scaling {show(kind)} is not supported; these are: {can}")
    return SCALINGS[kind](scaling, theta, rotary_size, max_model_len)


def _plain(_scaling: Fields, theta: float, rotary_size: int, _max_context: int) -> RopeSpec:
    return RopeSpec(theta, rotary_size)


def _linear(scaling: Fields, theta: float, rotary_size: int, _max_context: int) -> RopeSpec:
    return RopeSpec(theta, rotary_size, (_factor(scaling),) * (rotary_size // 2))


def _llama3(scaling: Fields, theta: float, rotary_size: int, max_model_len: int) -> RopeSpec:
    """Stretch long waves by `factor`, keep short ones, and blend those between."""
    factor = _factor(scaling)
    low = scaling.real("low_freq_factor", MIN_FACTOR, MAX_FACTOR)
    high = scaling.real("high_freq_factor", MIN_FACTOR, MAX_FACTOR)
    if high <= low:
        raise scaling.wrong("high_freq_factor", f"not above low_freq_factor {low:g}")
    context = _trained_context(scaling, max_model_len)
    factors = []
    for i in range(rotary_size // 2):
        turns = context / (2 * math.pi * theta ** (2 * i / rotary_size))  # within the trained context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - keep) / factor + keep))
    return RopeSpec(theta, rotary_size, tuple(factors))


def _yarn(scaling: Fields, theta: float, rotary_size: int, max_model_len: int) -> RopeSpec:
    """Like llama3, but blended by the index of the pair; cosines and sines grow with the logarithm of the factor."""
    if theta <= 1:
        raise ModelFileError(f"{scaling.source}: rope theta is {theta:g}: yarn needs more than 1")
    context = _trained_context(scaling, max_model_len)
    factor = scaling.find_real("factor", MIN_FACTOR, MAX_FACTOR) or max_model_len / context
    fast = scaling.find_real("beta_fast", MIN_FACTOR, MAX_FACTOR) or 32.0
    slow = scaling.find_real("beta_slow", MIN_FACTOR, MAX_FACTOR) or 1.0

    def pair_turning(num_turns: float) -> float:
        return rotary_size * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(fast), pair_turning(slow)
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    span = high - low or 0.001
    stretch = [min(max((i - low) / span, 0.0), 1.0) for i in range(rotary_size // 2)]
    factors = tuple(1 / (one / factor + 1 - one) for one in stretch)
    return RopeSpec(theta, rotary_size, factors, _yarn_attention(scaling, factor))


def _yarn_attention(scaling: Fields, factor: float) -> float:
    given = scaling.find_real("attention_factor", MIN_FACTOR, MAX_FACTOR)
    if given is not None:
        return given
    mscale = scaling.find_real("mscale", 0, MAX_FACTOR)
    mscale_all = scaling.find_real("mscale_all_dim", 0, MAX_FACTOR)

    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return grown(mscale) / grown(mscale_all) if mscale and mscale_all else grown(1.0)


def _longrope(scaling: Fields, theta: float, rotary_size: int, max_model_len: int) -> RopeSpec:
    """Use two measured lists of factors: one for contexts up to the trained length, one for longer ones."""
    context = _trained_context(scaling, max_model_len)
    short = scaling.reals("short_factor", rotary_size // 2, MIN_FACTOR, MAX_FACTOR)
    long = scaling.reals("long_factor", rotary_size // 2, MIN_FACTOR, MAX_FACTOR)
    factor = scaling.find_real("factor", MIN_FACTOR, MAX_FACTOR) or max_model_len / context
    attention = scaling.find_real("attention_factor", MIN_FACTOR, MAX_FACTOR)
    if attention is None:
        attention = 1.0 if factor <= 1 or context == 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    return RopeSpec(theta, rotary_size, short, attention, long, context)


def _factor(scaling: Fields) -> float:
    return scaling.real("factor", MIN_FACTOR, MAX_FACTOR)


def _trained_context(scaling: Fields, max_model_len: int) -> int:
    return scaling.whole("original_max_position_embeddings", 1, MAX_CONTEXT, max_model_len)


SCALINGS: dict[str, Callable[[Fields, float, int, int], RopeSpec]] = {
    "default": _plain,
    "none": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
