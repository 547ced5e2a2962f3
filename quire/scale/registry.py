"""The routers and choosers of this process, by the application of their model.

Ray sends the class of the router to other processes as a copy with variables of its own, so these are not defined
beside it.
"""

from __future__ import annotations

from typing import Any, Protocol

from quire.scale.transport import Chooser


class ReplicaFinder(Protocol):
    def find(self, replica: str) -> Any:
        """Ray's object for a replica, or None."""


choosers: dict[str, Chooser] = {}
routers: dict[str, ReplicaFinder] = {}
