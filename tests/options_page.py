"""Writes docs/options.md from the options of the commands: `make docs`. A test compares the page with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from quire.cli.main import COMMANDS, app

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
SERVE_GROUPS = {
    "Address and access": (
        *("host", "port", "api_key", "admin_api_key", "api_keys_file", "insecure", "allowed_origins", "allowed_hosts"),
        *("ssl_certfile", "ssl_keyfile", "root_path"),
    ),
    "Models": ("models_dir", "served_model_name", "memory", "idle_unload", "load_format", "max_model_len"),
    "Computing": ("backend", "device", "dtype", "precision", "threads"),
    "KV cache": (
        *("kv_memory", "num_blocks", "block_size", "enable_prefix_caching", "share_prefix_cache", "enable_drafts"),
        *("host_cache", "disk_cache", "cache_dir"),
    ),
    "Scheduling": (
        *("scheduling_policy", "normal_share", "low_share", "patience", "max_num_seqs", "max_num_batched_tokens"),
        "max_chunk_tokens",
        "max_mixed_tokens",
    ),
    "Files and batches": ("state_dir", "max_file_size", "max_file_storage"),
    "Events for routers": ("kv_events", "kv_events_replay", "kv_events_topic"),
}
OTHER = "Limits, logs and everything else"
HEAD = """# Options

This page is generated from the code by `make docs`. The guide to serving is [serving.md](serving.md).

Every option of `quire serve` can be a flag, an environment variable (`QUIRE_` and its name) or an entry of the YAML
file given by `--config`, with the same name. Flags override the environment, the environment overrides the file.
Options that can be repeated are lists in YAML, and separated by blanks in the environment. Sizes are written as `512M`
or `2G`. Paths in the file are relative to its folder.

The fields of `EngineConfig` and the arguments of `LLM` have the names of these options, with underscores.
"""


def command_of(name: str) -> Any:
    """The command as click sees it. Typer brings a click of its own, so there is no type to name."""
    group: Any = typer.main.get_command(app)
    return group.get_command(group.make_context("quire", [], resilient_parsing=True), name)


def all_commands() -> list[tuple[str, Any]]:
    """All commands by name. A command with subcommands is replaced by those."""
    found = []
    for name in COMMANDS:
        command = command_of(name)
        below = getattr(command, "commands", None)
        found += [(f"{name} {sub}", one) for sub, one in below.items()] if below else [(name, command)]
    return found


def options_of(command: Any) -> list[Any]:
    return [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option"
        and not getattr(parameter, "hidden", False)
        and parameter.name != "help"
    ]


def row(option: Any, *, has_variables: bool) -> str:
    """One row of a table: flags, default, environment variable, help."""
    flags = "`" + "`, `".join([*option.opts, *option.secondary_opts]) + "`"
    default = option.default
    if callable(default) or default is None or default == () or default is False:
        shown = ""
    elif default is True:
        shown = "on"
    else:
        shown = f"`{default}`" if default != "" else ""
    text = re.sub(r"\s+", " ", option.help or "").replace("|", "\\|")
    cells = [flags, shown, text]
    if has_variables:
        cells.insert(2, f"`QUIRE_{str(option.name).upper()}`")
    return "| " + " | ".join(cells) + " |"


def table(options: list[Any], *, has_variables: bool) -> str:
    heads = ["option", "default", "environment", "meaning"] if has_variables else ["option", "default", "meaning"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(row(option, has_variables=has_variables) for option in options)]) + "\n"


def page() -> str:
    parts = [HEAD, "\n## quire serve\n"]
    options = {option.name: option for option in options_of(command_of("serve"))}
    grouped = {name for names in SERVE_GROUPS.values() for name in names}
    groups = {**SERVE_GROUPS, OTHER: tuple(name for name in options if name not in grouped)}
    for title, names in groups.items():
        parts.append(f"\n### {title}\n\n" + table([options[name] for name in names], has_variables=True))
    for name, command in all_commands():
        if name == "serve" or command.hidden or not (found := options_of(command)):
            continue
        usage = re.sub(
            r"\s+", " ", command.get_usage(command.make_context(f"quire {name}", [], resilient_parsing=True))
        )
        parts.append(f"\n## quire {name}\n\n`{usage.removeprefix('Usage: ')}`\n\n" + table(found, has_variables=False))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
