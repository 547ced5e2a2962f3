"""A step while it is being planned."""

from __future__ import annotations

from quire.core.request import Priority, Request
from quire.core.step import BlockCopy, SeqSlice


class StepDraft:
    __slots__ = (
        "admitted",
        "allotted",
        "budget",
        "copies",
        "has_in_flight",
        "is_closed",
        "left_out",
        "now_ns",
        "pending",
        "short",
        "slices",
        "victims",
    )

    def __init__(self, now_ns: int, budget: int, *, has_in_flight: bool) -> None:
        self.now_ns = now_ns
        self.budget = budget  # tokens left beyond one for every running request
        self.has_in_flight = has_in_flight  # a step before this one is not committed yet
        self.is_closed = False  # a request did not fit: no other one is admitted in its place
        self.allotted: dict[
            int, int
        ] = {}  # request id -> tokens that a turn gave it; no entry: one, or none if rationed
        self.left_out: list[Request] = []  # running, with something to compute, and without a token
        self.short: set[Priority] = set()  # tiers that wanted more than they got
        self.slices: list[SeqSlice] = []
        self.copies: list[BlockCopy] = []
        self.admitted: set[int] = set()  # in this step
        self.victims: list[Request] = []  # preempted in this step
        # Block number -> chain key of a block that running requests are to compute next -> those requests
        self.pending: dict[int, dict[bytes, list[Request]]] = {}
