"""The page's Markdown, run by node: its work grows with the text and not faster, and marks mean what they meant."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.server.web import page_files
from tests.waiting import HANG_S

HARNESS = Path(__file__).with_name("markdown.mjs")
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")
SMALL, LARGE = 4_000, 16_000

PIECES = (
    "~", "~~~", "~~~ ", "~~~\n", "~~a", "*", "_", "`", "``", "[", "]", "<", "|", ">", "(", ")", "!", "![", "\\", "#",
    "-", "- ", "* ", "1. ", "> ", "> > ", "*a ", "**a", "***a", "_a", "__a", "~~a ", "`a``", "[a](", "![x](", "[a](b ",
    '[a](b "', "[[a](x)", "](", "https://", "http://%", "http://% ", "http://a.", "|a", "a|b\n", "|-|\n", "|\n", "a\n",
    "- a\n", "  - a\n", "> a\n", "```\n", "# a\n", "---\n", "- - -x\n", "# \u2028", "<!--", "\\`", "*`", "  \n", "a*b_",
)  # fmt: skip
# Texts of about n characters that a search from each place, or a regular expression that tries again, reads n times.
SHAPES: dict[str, Callable[[int], str]] = {
    "a fence and a backtick": lambda n: "~" * n + "`",
    "a fence, blanks and a backtick": lambda n: "~~~" + " " * n + "`",
    "a fence of backticks, blanks and one more": lambda n: "```" + " " * n + "x`",
    "code that begins with a blank": lambda n: "` " + "a" * n + "`",
    "code of blanks": lambda n: "` " + " " * n + "a`",
    "a heading with a line separator": lambda n: "#" + " " * n + "\u2028",
    "an address with dots inside": lambda n: "http://a" + "." * n + "a",
    "brackets before a far end": lambda n: "[" * (n // 2) + "a" * (n // 2) + "](",
    "brackets and a link": lambda n: "[a" * (n // 4) + "a" * (n // 2) + "](x)",
    "backticks of each length": lambda n: " ".join("`" * i for i in range(1, int((2 * n) ** 0.5))),
    "stars of each length": lambda n: " a".join("*" * i for i in range(1, int((2 * n) ** 0.5))),
    "deep lists": lambda n: "\n".join("  " * i + "- a" for i in range(int(n**0.5))),
    "deep quotes": lambda n: ">" * n,
    "almost a rule": lambda n: "- " * (n // 2) + "x",
    "a far item": lambda n: " " * n + "-x",
    "a wide table": lambda n: "|a" * (n // 4) + "\n" + "|-" * (n // 4),
    "short rows of a wide table": lambda n: "|a" * 40 + "|\n" + "|-" * 40 + "|\n" + "|\n" * (n // 2),
    "lines that are almost tables": lambda n: "|a\n|-x\n" * (n // 7),
    "fences in items": lambda n: "- ```\n" * (n // 6),
    "an address with parentheses": lambda n: "[a](https://a.b" + "(b)" * (n // 3),
    "titles without end": lambda n: '[a](https://a.b "x' * (n // 18),
    "emphasis in emphasis": lambda n: "*a **b " * (n // 14) + "c** d*" * (n // 14),
}
# Those whose work is in regular expressions, which the harness does not count.
BACKTRACKING = [*SHAPES][:7]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "package.json").write_text('{"type": "module"}')
    for name, data in page_files().items():
        (folder / name).write_bytes(data)
    return folder / "markdown.js"


def render(module: Path, texts: Sequence[str]) -> list[Any]:
    """Steps and nodes of each text. A search that reads a large text again and again ends at the limit."""
    command = [str(NODE), str(HARNESS), str(module)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def growth(module: Path, make: dict[str, Callable[[int], str]]) -> dict[str, float]:
    """By how much the steps grow when the text is four times as long."""
    small, large = (render(module, [one(size) for one in make.values()]) for size in (SMALL, LARGE))
    return {name: b["steps"] / a["steps"] for name, a, b in zip(make, small, large, strict=True)}


def repeated(piece: str) -> Callable[[int], str]:
    return lambda n: (piece * (n // len(piece) + 1))[:n]


def test_the_work_grows_with_the_text(module: Path) -> None:
    found = growth(module, SHAPES | {repr(piece): repeated(piece) for piece in PIECES})
    assert {name: ratio for name, ratio in found.items() if ratio > 5} == {}  # four times the text; its square: 16


@pytest.mark.nightly
def test_the_work_grows_with_texts_made_at_random(module: Path) -> None:
    rng = random.Random(41)
    pieces = ["".join(rng.choices(PIECES, k=rng.randint(2, 5))) for _ in range(150)]
    found = growth(module, {piece: repeated(piece) for piece in pieces})
    assert {name: ratio for name, ratio in found.items() if ratio > 5} == {}


@pytest.mark.parametrize("name", BACKTRACKING)
def test_no_expression_tries_a_long_text_again(module: Path, name: str) -> None:
    """A million characters: with a try for each of them this takes an hour, without a second."""
    (found,) = render(module, [SHAPES[name](1_000_000)])
    assert found["steps"] < 30_000_000


@pytest.mark.nightly
def test_a_hundred_thousand_nodes_are_rendered(module: Path) -> None:
    """As arguments of one call they would be too many."""
    texts = [piece * 150_000 for piece in ("- a\n", "*a* ", "> - a\n", "|a|\n|-|\n|a|\n", "a\n\n")]
    assert [one["steps"] > 150_000 for one in render(module, texts)] == [True] * len(texts)


MEANINGS: tuple[tuple[str, Any], ...] = (
    ("` a `", [["p", ["code", "a"]]]),
    ("`  `", [["p", ["code", "  "]]]),
    ("` a`", [["p", ["code", " a"]]]),
    ("``a`b`` `c`", [["p", ["code", "a`b"], " ", ["code", "c"]]]),
    ("`a ``b`", [["p", ["code", "a ``b"]]]),
    ("`a``", [["p", "`a``"]]),
    ("\\`a` b`", [["p", "`a", ["code", " b"]]]),
    ("~~~ py x\na\n~~~", [["div", ["div", ["span", "py"], ["button", "Copy"]], ["pre", ["code", "a"]]]]),
    ("```a`", [["p", "```a`"]]),
    ("~~~a`b", [["p", "~~~a`b"]]),
    ("# a", [["h3", "a"]]),
    ("###", [["h5"]]),
    ("#a", [["p", "#a"]]),
    ("####### a", [["p", "####### a"]]),
    ("https://a.b/c.. d", [["p", ["a", "https://a.b/c"], ".. d"]]),
    ("http://%http://a.b c", [["p", "http://%http://a.b c"]]),
    ("http://% http://a.b", [["p", "http://% ", ["a", "http://a.b"]]]),
    ("[[a](https://a.b)", [["p", "[", ["a", "a"]]]),
    ("[a] [b](https://a.b)", [["p", "[a] ", ["a", "b"]]]),
    ("- a\n  - b\n- c", [["ul", ["li", "a", ["ul", ["li", "b"]]], ["li", "c"]]]),
    ("-\n- b", [["ul", ["li"], ["li", "b"]]]),
    ("|a|b|\n|-|-|\n|c|\n|d|e|f|", [["div", ["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]],
        ["tbody", ["tr", ["td", "c"]], ["tr", ["td", "d"], ["td", "e"]]]]]]),
)  # fmt: skip


def test_what_marks_mean(module: Path) -> None:
    found = render(module, [text for text, _ in MEANINGS])
    assert [(text, one["nodes"]) for (text, _), one in zip(MEANINGS, found, strict=True)] == list(MEANINGS)
