"""What a front needs from a cluster. `quire/scale/ray_serve.py` implements it with Ray Serve.

`choosers` and `routers` are those of this process, by the application of their model. Ray sends the class of the router
to other processes as a copy with variables of its own, so these are not defined beside it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol


class ReplicaGone(Exception):
    """A replica ended, or cannot be reached."""


class Chooser(Protocol):
    """Decides where requests go. Belongs to the front; the cluster's router calls it in the same event loop."""

    def set_replicas(self, replicas: Sequence[str]) -> None:
        """The replicas that accept requests now."""

    def uses(self, replica: str) -> bool:
        """Whether the front is connected to a replica, which may be one that accepts no requests any more."""

    def rank(self, number: int, candidates: Sequence[str]) -> list[str]:
        """The replicas for a request, the best first. Those that the front is not connected to are left out.

        A request that was cancelled may go to any replica.
        """

    def note_routed(self, number: int, replica: str) -> None:
        """A replica has accepted a request, which is to be sent there now."""


class Transport(Protocol):
    """Messages between one front and the replicas of one model. Its methods raise ReplicaGone."""

    def start(self, chooser: Chooser) -> None:
        """Begin to report replicas to the chooser."""

    async def choose(self, number: int) -> None:
        """Find a replica for request `number`: the first in the chooser's order that accepts it.

        It is reported to `Chooser.note_routed`. Waits while there is none.
        """

    async def send(self, replica: str, frames: Sequence[bytes]) -> None:
        """Send messages to a replica."""

    def messages(self, replica: str) -> AsyncGenerator[list[bytes], None]:
        """The stream of messages of a replica."""

    async def close(self) -> None: ...


Batches = AsyncGenerator[list[bytes], None]


async def joined(open_stream: Callable[[bool], Batches]) -> Batches:
    """The messages of a replica, which ends its stream now and then to continue in another one.

    An empty batch is the last one of a stream that is continued. `open_stream`: opens the first one, or with True one
    that continues. A stream is closed only when the next one has begun: a replica that is being stopped would end if
    there were no stream for a moment.
    """
    earlier, current = None, open_stream(False)
    try:
        while True:
            async for frames in current:
                if earlier is not None:
                    await earlier.aclose()
                    earlier = None
                if not frames:
                    break
                yield frames
            else:
                return
            earlier, current = current, open_stream(True)
    finally:
        for stream in (earlier, current):
            if stream is not None:
                await stream.aclose()


class ReplicaFinder(Protocol):
    def find(self, replica: str) -> Any:
        """Ray's object for a replica, or None."""


choosers: dict[str, Chooser] = {}
routers: dict[str, ReplicaFinder] = {}
