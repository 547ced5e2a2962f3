"""Runs third-party clients, each in its own environment, against a real server: `make clients`.

Environments are created once under build/clients and kept until a pin changes.
tests/clients/table.py lists the clients.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.weights.hub import DEFAULT_MODEL
from tests.clients.models import write_long_model, write_tokenizer
from tests.clients.scripts import checks
from tests.clients.table import CLIENTS, TORCH, Client
from tests.server.rig import Server, serving

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "clients"
TOKENIZER = ENVIRONMENTS / "tokenizer"
SCRIPTS = Path(__file__).parent / "scripts"
INSTALL_S = 1800.0
RUN_S = 3 * 3600.0
_LEADING = ("PYTHONPATH", "VIRTUAL_ENV", "OPENAI_", "ANTHROPIC_", "CLAUDE", "CODEX_", "LITELLM_", "LLM_", "OLLAMA_")


class Outcome(NamedTuple):
    is_well: bool
    detail: str


Results = dict[Client, dict[str, Outcome]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__)
    names = ", ".join(dict.fromkeys(client.environment for client in CLIENTS))
    parser.add_argument("clients", nargs="*", help=f"some of {names}")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args(arguments)
    chosen = [client for client in CLIENTS if not options.clients or client.environment in options.clients]
    missing = [client for client in chosen if not install(client)]
    write_tokenizer(TOKENIZER)
    results = run_served([client for client in chosen if client not in missing], options.model)
    print(table(results))
    for client in missing:
        print(f"{client.name}: not installed")
    is_well = all(outcome.is_well for outcomes in results.values() for outcome in outcomes.values())
    return 0 if is_well and not missing else 1


def run_served(clients: Sequence[Client], model: str) -> Results:
    """Run each client against a server. Clients with long prompts get one with a longer context."""
    results: Results = {}
    if plain := [client for client in clients if not client.wants_long_context]:
        with serving(model) as server:
            results |= run_all(plain, server)
    if long := [client for client in clients if client.wants_long_context]:
        path = write_long_model(ENVIRONMENTS / "model")
        # One client at a time, so all cores can be used. The rig's default of one thread is meant for parallel tests.
        threads = {"QUIRE_THREADS": str(os.cpu_count() or 1)}
        with serving(str(path), "--served-model-name", model, env=threads) as server:
            results |= run_all(long, server)
    return results


# Environments


def install(client: Client) -> bool:
    """Create the environment of a client. Returns whether it succeeded, and prints errors."""
    folder = ENVIRONMENTS / client.environment
    stamp = folder / ".installed"
    wanted = " ".join(sorted(client.pins))
    if stamp.exists() and stamp.read_text() == wanted:
        return True
    print(f"installing {wanted}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    is_well = _install_node(folder, client) if client.is_node else _install_python(folder, client)
    if is_well:
        stamp.write_text(wanted)
    return is_well


def _install_node(folder: Path, client: Client) -> bool:
    return _ran(["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), *client.pins])


def _install_python(folder: Path, client: Client) -> bool:
    pip = [str(folder / "bin" / "pip"), "install", "--quiet"]
    is_well = _ran([sys.executable, "-m", "venv", str(folder)])
    if TORCH in client.pins:
        is_well = is_well and _ran([*pip, TORCH])
    is_well = is_well and _ran([*pip, *client.pins])
    packages = {path.name for path in folder.glob("lib/python*/site-packages/*")}
    unwanted = {name for name in packages if name.startswith("nvidia")}
    if TORCH not in client.pins:
        unwanted |= packages & {"torch"}
    if unwanted:
        print(f"{client.name}: its dependencies include {', '.join(sorted(unwanted))}, which no client needs")
    return is_well and not unwanted


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


def run_all(clients: Sequence[Client], server: Server) -> Results:
    results: Results = {}
    model = str(server.get("/v1/models").json["data"][0]["id"])
    for client in clients:
        results[client] = run(client, server.url, model)
        for name, outcome in results[client].items():
            print(f"{client.name:20} {name:8} {'ok' if outcome.is_well else 'FAILED':7} {outcome.detail}", flush=True)
    return results


def run(client: Client, url: str, model: str) -> dict[str, Outcome]:
    """The outcome of every check. A check that was not reported has failed."""
    # Unique per client and run: the usage check needs a first request without cached tokens.
    salted = f"Client {client.name} of run {os.getpid()}. {checks.LONG}"
    words = {
        "question": checks.QUESTION,
        "long": salted,
        "weather": checks.WEATHER,
        "city_schema": checks.CITY_SCHEMA,
        "capital_schema": checks.CAPITAL_SCHEMA,
        "no_model": checks.NO_MODEL,
    }
    given = {
        "QUIRE_URL": url,
        "QUIRE_MODEL": model,
        "QUIRE_LONG": salted,
        "QUIRE_WORDS": json.dumps(words),
        "QUIRE_CHECKS": " ".join(client.checks),
        "QUIRE_TOKENIZER": str(TOKENIZER),
        "QUIRE_ENVIRONMENT": str(ENVIRONMENTS / client.environment),
    }
    try:
        done = subprocess.run(
            _command(client),
            env={**_environment(), **given},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        print(error.stderr, file=sys.stderr)
        return dict.fromkeys(client.checks, Outcome(False, f"not done in {RUN_S:.0f} s"))
    found = _reported(done.stdout)
    if len(found) < len(client.checks) or not all(outcome.is_well for outcome in found.values()):
        print(done.stderr[-6000:], file=sys.stderr)
    return {name: found.get(name, Outcome(False, "not reported")) for name in client.checks}


def _command(client: Client) -> list[str]:
    folder = ENVIRONMENTS / client.environment
    script = SCRIPTS / client.script
    if script.suffix == ".py":
        python = sys.executable if client.is_node else str(folder / "bin" / "python")
        return [python, str(SCRIPTS), script.stem]
    beside = folder / client.script  # Node.js searches modules relative to the script
    shutil.copyfile(script, beside)
    return ["node", str(beside), *client.arguments]


def _environment() -> dict[str, str]:
    """The environment without variables that point a client to another server or to our packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEADING)}
    return kept | {
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _reported(text: str) -> dict[str, Outcome]:
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"check"')]
    return {row["check"]: Outcome(row["ok"], row["detail"]) for row in rows}


def table(results: Mapping[Client, Mapping[str, Outcome]]) -> str:
    """The Markdown table of docs/clients.md."""
    lines = ["| client | version | works | does not |", "|---|---|---|---|"]
    for client, outcomes in results.items():
        works = ", ".join(name for name, outcome in outcomes.items() if outcome.is_well)
        fails = ", ".join(name for name, outcome in outcomes.items() if not outcome.is_well)
        lines.append(f"| {client.name} | {client.version} | {works} | {fails} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
