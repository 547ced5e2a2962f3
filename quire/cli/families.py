"""The table of model families that run, made from the code: `quire models --families`, and docs/families.md."""

from __future__ import annotations

from typing import Any

from quire.text.tool_formats import PROMPTED
from quire.weights.families import FAMILIES, Family

OWN_BACKENDS = ("native", "torch")  # mlx runs what mlx-lm runs


def family_rows() -> list[dict[str, Any]]:
    """Return one row per family, as plain values."""
    return [
        {
            "family": row.name,
            "models": row.models,
            "architectures": list(row.architectures),
            "gguf": row.gguf,
            "backends": list(OWN_BACKENDS),
            "formats": ["safetensors", "gguf"],
            "has_experts": row.experts is not None,
            "has_windows": row.windows.value != 0,
            "tools": row.tools or PROMPTED.name,
            "reasoning": row.reasoning or None,
        }
        for row in FAMILIES
    ]


def family_table() -> str:
    """Return the rows as a table in Markdown."""
    heads = ("family", "models", "classes in config.json", "GGUF architecture", "tools", "reasoning")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in FAMILIES]
    return "\n".join(lines)


def _cells(row: Family) -> tuple[str, ...]:
    classes = ", ".join(f"`{name}`" for name in row.architectures)
    reasoning = f"`{row.reasoning}`" if row.reasoning else ""
    return (row.name, row.models, classes, f"`{row.gguf}`", f"`{row.tools or PROMPTED.name}`", reasoning)
