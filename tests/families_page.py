"""Writes docs/families.md from the table of families: `make docs`. A test compares the page with the code."""

from __future__ import annotations

from pathlib import Path

from quire.cli.models import family_rows

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEAD = """# Model families

This page is generated from the code by `make docs`; `quire models --families` prints the same table. How to choose a
model: [models.md](models.md).

quire has its own equations for these families. They run on the native backend (CPU) and on the torch backend (NVIDIA
GPU and CPU), from folders of safetensors and from GGUF files. On Apple silicon, mlx-lm has the equations
([apple.md](apple.md)); there, GGUF files run for llama, mistral, qwen2, qwen3, gemma3 and phi3.

The column tools names the format in which the models' own chat templates write tool calls. `prompt` means that quire
describes the tools in the system prompt ([tools.md](tools.md)). The column reasoning names the marks around the
reasoning of those models of the family that reason. Both are detected from the chat template in the file.

"""


def page() -> str:
    heads = ("family", "models", "classes in config.json", "GGUF architecture", "tools", "reasoning")
    rows = [
        (
            *(row["family"], row["models"], ", ".join(f"`{name}`" for name in row["architectures"])),
            *(f"`{row[field]}`" if row[field] else "" for field in ("gguf", "tools", "reasoning")),
        )
        for row in family_rows()
    ]
    lines = [f"| {' | '.join(cells)} |\n" for cells in (heads, *rows)]
    lines.insert(1, f"|{'---|' * len(heads)}\n")
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
