"""A server that writes down which requests take a turn, and in which threads they work."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.server.rig import hooked

LOG = "QUIRE_TEST_TURNS"
LOOP = "loop"  # much work on the event loop
THREAD = "thread"  # in a thread of asyncio's pool, where keys take no turns


def logging_turns(folder: Path) -> dict[str, str]:
    """The environment of such a server."""
    code = "from tests.server.turn_log import install\n\ninstall()\n"
    return hooked(folder, code, **{LOG: str(folder / "turns")})


def read_turns(folder: Path) -> list[str]:
    """The turns since the last call, in their order."""
    file = folder / "turns"
    found = file.read_text().split() if file.exists() else []
    file.write_text("")
    return found


def install() -> None:
    if LOG not in os.environ or "serve" not in sys.orig_argv:  # a worker, or a child of one
        return
    from quire.server.limits import FairSlots
    from quire.text.tokenizer import Tokenizer

    run, turn, to_thread = FairSlots.run, FairSlots.turn, asyncio.to_thread

    async def logged_run(self: FairSlots, tenant: str, pool: Any, work: Any) -> Any:
        _write(pool._thread_name_prefix)
        return await run(self, tenant, pool, work)

    @asynccontextmanager
    async def logged_turn(self: FairSlots, tenant: str) -> AsyncIterator[None]:
        _write("turn")
        async with turn(self, tenant):
            yield

    async def logged_thread(*values: Any, **named: Any) -> Any:
        _write(THREAD)
        return await to_thread(*values, **named)

    _log_long_calls(Tokenizer, "encode_plain", 4000)
    _log_long_calls(Tokenizer, "decode", 2048)
    FairSlots.run = logged_run  # type: ignore[method-assign]
    FairSlots.turn = logged_turn  # type: ignore[method-assign]
    asyncio.to_thread = logged_thread


def _log_long_calls(owner: type, name: str, max_size: int) -> None:
    """Write down calls with long arguments on the event loop."""
    original = getattr(owner, name)

    def logged(self: Any, values: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and len(values) > max_size:
            _write(LOOP)
        return original(self, values, **named)

    setattr(owner, name, logged)


def _write(name: str) -> None:
    with Path(os.environ[LOG]).open("a") as file:
        file.write(f"{name}\n")
