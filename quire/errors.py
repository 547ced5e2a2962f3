"""Every error quire raises on purpose. The lowest layer: it imports nothing of quire."""

from __future__ import annotations

import shlex
import sys

# Where a package is not called like the module it brings.
_PACKAGES = {"yaml": "pyyaml"}


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

    @classmethod
    def of(cls, what: str, module: str | None) -> MissingExtra:
        """`what` cannot go on without `module`, which could not be imported."""
        package = package_of(module or "")
        return cls(f"{what} needs {package}, which is not installed: {install_command(package)}", name=module)


def package_of(module: str) -> str:
    top = module.partition(".")[0]
    return _PACKAGES.get(top, top.replace("_", "-"))


def install_command(package: str) -> str:
    """Into the environment that runs: never by an extra of quire, which an index may have of somebody else."""
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


class InvariantViolation(QuireError, AssertionError):
    """A law of the core does not hold: a bug in quire, never the caller's fault."""


class ModelFileError(QuireError):
    """A model file that is damaged, forged, incomplete or of a kind quire cannot read."""


class UnsupportedModel(ModelFileError):
    """A sound model whose architecture, tokenizer or tensor type quire does not run; names it and what does."""


class ModelNotFound(QuireError):
    """No such model: not a file, a folder, a known name or a model in the cache."""


class DownloadFailed(QuireError):
    """A model could not be fetched. Nothing half-fetched is kept as if it were whole."""


class LoadFailed(QuireError):
    """A model could not be loaded. Another try may go better."""


class ModelTooLarge(LoadFailed):
    """A model that does not fit beside what may not be unloaded. The message has the numbers."""


class TemplateError(QuireError):
    """A chat template that is missing, wrong, or did not finish within its limits."""


class RequestFailed(QuireError):
    """One request failed while it was served: its sampler, detokeniser or callback. Nobody else is affected."""


class WorkerDied(QuireError):
    """The process that runs the model crashed or hung. Its requests failed; the next one gets a fresh worker."""


class LostBeforeStart(WorkerDied):
    """The worker died while this request still waited: it was no part of the cause, and asking again is safe."""
