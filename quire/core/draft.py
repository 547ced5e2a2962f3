"""A step while it is being planned."""

from __future__ import annotations

from collections.abc import Collection

from quire.core.request import Priority, Request
from quire.core.step import BlockCopy, SeqSlice


class StepDraft:
    __slots__ = (
        "admitted",
        "allotted",
        "budget",
        "closed_from",
        "copies",
        "decodes",
        "has_in_flight",
        "left_out",
        "now_ns",
        "pending",
        "rationed",
        "short",
        "slices",
        "victims",
        "wanting",
    )

    def __init__(self, now_ns: int, budget: int, *, has_in_flight: bool) -> None:
        self.now_ns = now_ns
        self.budget = budget  # tokens left beyond one for every running request
        self.has_in_flight = has_in_flight  # a step before this one is not committed yet
        self.closed_from: Priority | None = None  # this tier and those below it admit no more requests
        self.rationed: Collection[Priority] = ()  # tiers whose running requests need a turn to be in the step
        # Running requests of each tier that may want more tokens than their own; where rationed, also that one
        self.wanting: tuple[list[Request], list[Request], list[Request]] = ([], [], [])
        self.allotted: dict[
            int, int
        ] = {}  # request id -> tokens that a turn gave it; no entry: one, or none if rationed
        self.decodes: dict[tuple[Priority, str], int] = {}  # tier and tenant -> tokens that no turn gave
        self.left_out: list[Request] = []  # running, with something to compute, and without a token
        self.short: set[Priority] = set()  # tiers that wanted more than they got
        self.slices: list[SeqSlice] = []
        self.copies: list[BlockCopy] = []
        self.admitted: set[int] = set()  # in this step
        self.victims: list[Request] = []  # preempted in this step
        # Block number -> chain key of a block that running requests are to compute next -> those requests
        self.pending: dict[int, dict[bytes, list[Request]]] = {}

    def close(self, tiers: Collection[Priority]) -> None:
        """A waiting request of these tiers did not fit. None of them, or below them, is admitted in its place.

        A tier above them, whose turn comes later because they were owed service, may still preempt for what it needs.
        """
        self.closed_from = min(tiers) if self.closed_from is None else min(self.closed_from, *tiers)

    def is_closed(self, tiers: Collection[Priority]) -> bool:
        return self.closed_from is not None and min(tiers) >= self.closed_from
