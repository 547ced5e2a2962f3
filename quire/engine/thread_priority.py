"""The priority of threads that must not slow the steps of the model."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

NICENESS = 10  # about a tenth of a core beside one busy thread


def lower_thread_priority() -> None:
    """Let other threads run first. Only on Linux a thread has its own priority; it cannot be raised again."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):  # forbidden
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), NICENESS))
