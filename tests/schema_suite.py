"""Run the JSON-Schema-Test-Suite on rewritten schemas: `python -m tests.schema_suite PATH/tests/draft2020-12`.

The suite is not part of this repository. Every schema is rewritten and compiled without `strict`, and every instance is
written as JSON with its names in all orders. The verdict is "silent" if the grammar allows an instance that violates a
keyword which is not reported as unenforced; there must be none. jsonschema_rs validates the schema without the reported
keywords.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance

from quire.errors import InvalidRequest
from quire.text.grammar import json_schema_grammar, lark_json
from tests.text.judging import Letters

MAX_ORDERS = 120


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Letters("<end>")), n_vocab=257)


def compiled(held: dict[str, Any]) -> llguidance.LLMatcher:
    """Compile a rewritten schema. Raises ValueError if that is not possible."""
    source = llguidance.LLMatcher.grammar_from_lark(f"start: {lark_json(held)}")
    matcher = llguidance.LLMatcher(TOKENIZER, source, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def allows(matcher: llguidance.LLMatcher, text: str) -> bool:
    state = matcher.deep_copy()
    tokens = list(text.encode())
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


def spellings(value: object) -> Iterator[str]:
    """A value as JSON, with object names in every order and whole numbers with and without a decimal point."""
    match value:
        case dict():
            for order in itertools.islice(itertools.permutations(value.items()), MAX_ORDERS):
                for parts in itertools.product(*(list(spellings(item))[:4] for _, item in order)):
                    names = (json.dumps(name, ensure_ascii=False) for name, _ in order)
                    yield "{" + ", ".join(f"{n}: {part}" for n, part in zip(names, parts, strict=True)) + "}"
        case list():
            for parts in itertools.islice(itertools.product(*(list(spellings(one))[:4] for one in value)), MAX_ORDERS):
                yield f"[{', '.join(parts)}]"
        case float() if value.is_integer():
            yield from (json.dumps(value), str(int(value)))
        case _:
            yield json.dumps(value, ensure_ascii=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schema_suite")
    parser.add_argument("path", type=Path, help="a folder of the suite")
    parser.add_argument("--show", action="store_true", help="list every schema that is not fully enforced")
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    for file in sorted(options.path.rglob("*.json")):
        for group in json.loads(file.read_text()):
            if isinstance(group["schema"], dict):
                verdict, detail = judge(group["schema"], group["tests"])
                counts[verdict] += 1
                if options.show or verdict == "silent":
                    print(f"{verdict}: {file.name}: {group['description']}: {detail}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()), f"(of {counts.total()})")
    return 1 if counts["silent"] else 0


def judge(schema: dict[str, Any], tests: Sequence[dict[str, Any]]) -> tuple[str, str]:
    try:
        grammar = json_schema_grammar(schema, strict=False)
        matcher = compiled(json.loads(grammar.source))
    except (InvalidRequest, ValueError) as error:
        return "refused", " ".join(str(error).split())[:160]
    allowed = [test for test in tests if any(allows(matcher, one) for one in spellings(test["data"]))]
    missed = [test for test in tests if test["valid"] and test not in allowed]
    rest = without(schema, grammar.unenforced)
    for test in allowed:
        if not test["valid"] and not (grammar.unenforced and jsonschema_rs.is_valid(rest, test["data"])):
            named = ", ".join(grammar.unenforced) or "nothing"
            return "silent", f"{json.dumps(schema)[:300]} allows {json.dumps(test['data'])[:80]}; reported: {named}"
    if grammar.unenforced:
        return "named", ", ".join(grammar.unenforced)
    return "held", "; ".join(json.dumps(test["data"])[:60] for test in missed)


def without(schema: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The schema without these keywords."""
    rest = copy.deepcopy(schema)
    for path in paths:
        _remove(rest, path)
    return rest


def _remove(value: Any, path: str) -> bool:
    """Remove the keyword at `path`. Names may contain dots, so every way to split the path is tried."""
    if isinstance(value, list):
        found = re.match(r"\[(\d+)\]\.?", path)
        return found is not None and int(found[1]) < len(value) and _remove(value[int(found[1])], path[found.end() :])
    if not isinstance(value, dict):
        return False
    if path in value:
        del value[path]
        return True
    steps = [name for name in value if path.startswith(name) and path[len(name) : len(name) + 1] in (".", "[")]
    return any(_remove(value[name], path[len(name) :].removeprefix(".")) for name in steps)


if __name__ == "__main__":
    sys.exit(main())
