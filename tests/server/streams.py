"""Runs an `EventEncoder` over the batches of a fake request, in the order of `EventStream`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from quire.server.http import EventEncoder
from quire.server.models import ActiveRequest


async def events_of(active: ActiveRequest, encoder: EventEncoder) -> AsyncIterator[bytes]:
    """Yield what is written, one item for each write. Raises the request's error."""
    if encoder.waits_for_start:
        await active.wait_start()
    if data := encoder.begin():
        yield data
    async for batch in active.batches():
        if data := encoder.feed(batch):
            yield data
    yield encoder.finish()
