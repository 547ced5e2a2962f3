"""Clients nobody here wrote, each in an environment of its own, against a real server: `make clients`.

Environments are made once under build/clients and kept; a changed pin makes them anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire.weights.hub import DEFAULT_MODEL
from tests.clients.scripts import checks
from tests.server.rig import Server, serving

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
INSTALL_S = 900.0
RUN_S = 600.0
_LEADING = ("PYTHONPATH", "VIRTUAL_ENV", "OPENAI_", "ANTHROPIC_", "LITELLM_", "LLM_")


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    environment: str
    pins: tuple[str, ...]  # name==version for pip, name@version for npm
    script: str

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


# To add a client: a script that runs the checks, and a row.
CLIENTS = (
    Client("openai (npm)", "openai-npm", ("openai@7.53.0",), "openai_npm.mjs"),
    Client(
        "langchain-openai",
        "langchain",
        ("langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
        "by_langchain_openai.py",
    ),
    Client(
        "langchain-anthropic",
        "langchain",
        ("langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
        "by_langchain_anthropic.py",
    ),
    # LiteLLM imports mcp wherever a request has tools, and does not ask for it.
    Client("litellm", "litellm", ("litellm==1.106.2", "mcp==2.3.0"), "by_litellm.py"),
    Client("llm", "llm", ("llm==0.36",), "by_llm.py"),
)


class Outcome(NamedTuple):
    is_well: bool
    detail: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__)
    parser.add_argument("clients", nargs="*", help=f"some of {', '.join(client.environment for client in CLIENTS)}")
    parser.add_argument("--url", help="of a server that runs already, instead of one that is started")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args(arguments)
    chosen = [client for client in CLIENTS if not options.clients or client.environment in options.clients]
    missing = [client for client in chosen if not install(client)]
    if options.url is not None:
        results = run_all(chosen, options.url, options.model)
    else:
        with serving(options.model) as server:
            results = run_all(chosen, server.url, served_name(server))
    print(table(results))
    is_well = all(outcome.is_well for outcomes in results.values() for outcome in outcomes.values())
    return 0 if is_well and not missing else 1


def served_name(server: Server) -> str:
    return str(server.get("/v1/models").json["data"][0]["id"])


# Environments


def install(client: Client) -> bool:
    """Whether it could be. What went wrong is printed."""
    folder = ENVIRONMENTS / client.environment
    stamp = folder / ".installed"
    wanted = " ".join(client.pins)
    if stamp.exists() and stamp.read_text() == wanted:
        return True
    print(f"installing {wanted}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if client.is_node:
        is_well = _ran(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), *client.pins])
    else:
        is_well = _ran([sys.executable, "-m", "venv", str(folder)]) and _ran(
            [str(folder / "bin" / "pip"), "install", "--quiet", *client.pins]
        )
        if is_well and list(folder.glob("lib/python*/site-packages/torch")):
            print(f"{client.name}: it brought torch along, which no client needs")
            return False
    if is_well:
        stamp.write_text(wanted)
    return is_well


def _ran(command: Sequence[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{command[0]}: {error}")
        return False
    if done.returncode != 0:
        print(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.returncode == 0


# Runs


def run_all(clients: Sequence[Client], url: str, model: str) -> dict[Client, dict[str, Outcome]]:
    results: dict[Client, dict[str, Outcome]] = {}
    for client in clients:
        results[client] = run(client, url, model)
        for name, outcome in results[client].items():
            print(f"{client.name:20} {name:8} {'ok' if outcome.is_well else 'FAILED':7} {outcome.detail}", flush=True)
    return results


def run(client: Client, url: str, model: str) -> dict[str, Outcome]:
    """The outcome of every check; one that was not reported has failed."""
    # A cache that an earlier client filled would answer the first of two questions about usage.
    salted = f"Client {client.name}. {checks.LONG}"
    words = {
        "question": checks.QUESTION,
        "long": salted,
        "weather": checks.WEATHER,
        "city_schema": checks.CITY_SCHEMA,
        "capital_schema": checks.CAPITAL_SCHEMA,
        "no_model": checks.NO_MODEL,
    }
    given = {"QUIRE_URL": url, "QUIRE_MODEL": model, "QUIRE_LONG": salted, "QUIRE_WORDS": json.dumps(words)}
    done = subprocess.run(
        _command(client),
        env={**_environment(), **given},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    found = dict(_reported(done.stdout))
    if len(found) < len(checks.CHECKS) or not all(outcome.is_well for outcome in found.values()):
        print(done.stderr[-6000:], file=sys.stderr)
    return {name: found.get(name, Outcome(False, "not reported")) for name in checks.CHECKS}


def _command(client: Client) -> list[str]:
    folder = ENVIRONMENTS / client.environment
    script = SCRIPTS / client.script
    if not client.is_node:
        return [str(folder / "bin" / "python"), str(script)]
    beside = folder / client.script  # Node.js looks for modules beside the script
    shutil.copyfile(script, beside)
    return ["node", str(beside)]


def _environment() -> dict[str, str]:
    """Ours without what would lead a client elsewhere, or to our own packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEADING)}
    return kept | {"LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": "1"}


def _reported(text: str) -> list[tuple[str, Outcome]]:
    found: list[tuple[str, Outcome]] = []
    for line in text.splitlines():
        if line.startswith('{"check"'):
            row = json.loads(line)
            found.append((row["check"], Outcome(row["ok"], row["detail"])))
    return found


def table(results: Mapping[Client, Mapping[str, Outcome]]) -> str:
    """In Markdown, as docs/clients.md has it."""
    lines = [f"| client | version | {' | '.join(checks.CHECKS)} |", "|---" * (len(checks.CHECKS) + 2) + "|"]
    for client, outcomes in results.items():
        version = next(pin for pin in client.pins if pin.startswith(client.name.split()[0])).replace("@", "==")
        marks = " | ".join("ok" if outcomes[name].is_well else "FAILED" for name in checks.CHECKS)
        lines.append(f"| {client.name} | {version.partition('==')[2]} | {marks} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
