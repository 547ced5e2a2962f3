"""The environment of the commands: no server and no API key of this machine."""

from __future__ import annotations

import os

import pytest

from quire.cli import chat
from tests.cli.runs import EchoLLM

os.environ["QUIRE_SERVER"] = "none"
os.environ.pop("QUIRE_API_KEY", None)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> EchoLLM:
    """A model in this process that answers with the question."""
    llm = EchoLLM()
    monkeypatch.setattr(chat, "open_llm", lambda _model, _settings: llm)
    return llm
