"""`system_fingerprint` of real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.rig import serving

OPTIONS = ("--backend", "native", "--threads", "1", "--num-blocks", "60")
HI = [{"role": "user", "content": "Hi"}]


def fingerprint(model: Path, *options: str) -> str:
    """The same in every answer that has one."""
    with serving(str(model), *OPTIONS, *options) as server:
        found = {server.chat().json["system_fingerprint"]}
        found.add(server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).json["system_fingerprint"])
        for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "Hi"})):
            lines = server.post(path, {**body, "max_tokens": 2, "stream": True}).body.decode().splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            found |= {chunk["system_fingerprint"] for chunk in chunks}
    (one,) = found
    assert isinstance(one, str)
    return one


@pytest.mark.nightly
def test_servers_with_another_arithmetic_have_another_fingerprint(tiny_model: Path) -> None:
    """The port differs in each; the name and the limits of a server do not count."""
    first = fingerprint(tiny_model)
    assert first == fingerprint(tiny_model, "--served-model-name", "another", "--max-num-seqs", "3")
    assert first != fingerprint(tiny_model, "--precision", "exact")
