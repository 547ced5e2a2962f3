"""Makes golden bodies from recorded requests: keeps the structure and replaces every text by a synthetic one.

QUIRE_RECORD=build/captures make clients CLIENTS=claude
python -m tests.clients.trim build/captures/1795000000000000000.json tests/server/golden/claude_code_tool_result.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

KEPT_HEADERS = ("anthropic-beta", "anthropic-version", "accept", "content-type", "originator", "user-agent", "x-app")
OWN_TEXTS = ("Say hello", "Say a city", "Close the agent", "hello", "I-think", "Tool loaded.")  # of the recorded runs
LONGEST = 60
GRAMMAR = 'start: "add " NAME\nNAME: /[a-z]+/\n'
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{64}")


def trimmed(row: dict[str, Any]) -> dict[str, Any]:
    headers = {name.lower(): value for name, value in row["headers"].items()}
    return {
        "method": row["method"],
        "path": row["path"],
        "headers": {name: headers[name] for name in KEPT_HEADERS if name in headers},
        "body": _replaced(row["body"], "body"),
    }


def _replaced(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _replaced(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one, key) for one in value]
    return _text(value, key) if isinstance(value, str) else value


def _text(value: str, key: str) -> str:
    if key == "description":
        return "A synthetic description."
    if key == "definition":
        return GRAMMAR
    if value.startswith("{"):  # JSON in a string: arguments, metadata
        return json.dumps(_replaced(json.loads(value), key))
    if value.startswith("x-anthropic-billing-header"):
        return "x-anthropic-billing-header: cc_version=0.0.0.000; cc_entrypoint=sdk-cli;"
    if key.endswith("path"):
        return f"/project/{Path(value).name}" if value.startswith("/") and key == "file_path" else value
    if key in ("text", "content", "output", "thinking") and not value.startswith(OWN_TEXTS):
        return _synthetic(value)
    value = _UUID.sub(lambda found: re.sub("[0-9a-f]", "0", found[0]), value)
    return value if len(value) <= LONGEST or key == "$schema" else "A synthetic text."


def _synthetic(value: str) -> str:
    """A synthetic text, within the same tag as the original, if it has one."""
    tag = re.match(r"<([a-z_-]+)", value)
    return f"<{tag[1]}>\nA synthetic text.\n</{tag[1]}>" if tag else "A synthetic text."


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(trimmed(json.loads(source.read_text())), indent=1) + "\n")
