"""Every error quire raises on purpose. The lowest layer: it imports nothing of quire."""


class QuireError(Exception):
    """The base of all of them."""


class InvalidRequest(QuireError, ValueError):
    """A field of a request has a value that can never work. The message names the field and the value."""


class ContextTooLong(InvalidRequest):
    """The prompt and one answer token do not fit the context, however long one waits."""


class QueueFull(QuireError):
    """The waiting queue is at its bound. Trying again later may work."""


class Draining(QuireError):
    """The scheduler finishes what it has and takes nothing new."""


class OutOfBlocks(QuireError):
    """More blocks were asked for than are free. Nothing was changed."""


class TraceError(QuireError, ValueError):
    """A line of a recorded trace cannot be used. The message names the line and the field."""


class MissingExtra(QuireError, ImportError):
    """A part was asked for whose optional dependency is not installed. The message says what to install."""


class InvariantViolation(QuireError, AssertionError):
    """A law of the core does not hold: a bug in quire, never the caller's fault."""
