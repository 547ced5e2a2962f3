"""Mutable state of a step while it is planned."""

from __future__ import annotations

from collections.abc import Collection

from quire.core.request import Request
from quire.core.step import BlockCopy, SeqSlice
from quire.core.values import Priority


class StepBuilder:
    """Budget, turns, admissions and slices of the step that the planner builds."""

    __slots__ = (
        "admitted",
        "allotted",
        "awaiting",
        "budget",
        "closed_from",
        "copies",
        "decodes",
        "has_in_flight",
        "left_out",
        "needs",
        "now_ns",
        "num_drafts",
        "pending",
        "rationed",
        "saving",
        "short",
        "slices",
        "victims",
        "wanting",
        "window_copies",
    )

    def __init__(self, now_ns: int, budget: int, *, has_in_flight: bool) -> None:
        self.now_ns = now_ns
        self.budget = budget  # tokens left, not counting one reserved for every running request
        self.has_in_flight = has_in_flight  # the previous step is not committed yet
        self.closed_from: Priority | None = None  # this tier and those below it admit no more requests
        self.rationed: Collection[Priority] = ()  # tiers whose running requests need a turn to be in the step
        # Running requests of each tier that want a turn: for more than the reserved token, or for any token if rationed
        self.wanting: tuple[list[Request], list[Request], list[Request]] = ([], [], [])
        # Request id -> tokens that a turn gave it. Without an entry: one token, or none if rationed
        self.allotted: dict[int, int] = {}
        self.decodes: dict[tuple[Priority, str], int] = {}  # tier and tenant -> tokens that no turn gave
        self.left_out: list[Request] = []  # running requests that have work but got no token
        self.short: set[Priority] = set()  # tiers that wanted more than they got
        self.num_drafts = 0
        self.slices: list[SeqSlice] = []
        self.copies: list[BlockCopy] = []
        self.window_copies: list[BlockCopy] = []
        self.admitted: set[int] = set()  # ids of requests admitted in this step
        self.victims: list[Request] = []  # preempted in this step
        self.needs: dict[Priority, int] = {}  # tokens of the first waiting request of a tier, with a block of new ones
        self.saving: set[Priority] = set()  # tiers with a request that was preempted and has not caught up
        self.awaiting: Priority | None = None  # a request of this tier needs memory of one that is spared
        # Block number -> chain key of a block that running requests compute next -> those requests
        self.pending: dict[int, dict[bytes, list[Request]]] = {}

    def close(self, tiers: Collection[Priority]) -> None:
        """Stop admissions of these tiers and those below.

        Called if a waiting request of these tiers did not fit. A higher tier, whose turn comes later because these
        tiers were owed service, may still admit requests by preemption.
        """
        self.closed_from = min(tiers) if self.closed_from is None else min(self.closed_from, *tiers)

    def is_closed(self, tiers: Collection[Priority]) -> bool:
        return self.closed_from is not None and min(tiers) >= self.closed_from
