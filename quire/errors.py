"""All exceptions that quire raises on purpose.

The lowest layer: imports nothing from quire.
"""

from __future__ import annotations

import shlex
import sys

# Module name -> package name, where they differ.
_PACKAGES = {"yaml": "pyyaml", "zmq": "pyzmq"}


class QuireError(Exception):
    """Base class of all quire exceptions."""


class InvalidRequest(QuireError, ValueError):
    """A field of a request has an invalid value. The message names the field and the value."""


class ContextTooLong(InvalidRequest):
    """The prompt and one output token exceed the context length. A retry fails as well."""


class QueueFull(QuireError):
    """The waiting queue is full. A later retry may succeed."""


class Draining(QuireError):
    """The scheduler is draining: it finishes current requests and rejects new ones."""


class OutOfBlocks(QuireError):
    """More blocks were requested than are free. No state was changed."""


class TraceError(QuireError, ValueError):
    """A line of a trace file is invalid. The message names the line and the field."""


class MissingExtra(QuireError, ImportError):
    """An optional dependency is not installed.

    The message contains the command that installs it.
    """

    @classmethod
    def of(cls, what: str, module: str | None) -> MissingExtra:
        """Error for a feature `what` that needs `module`, which could not be imported."""
        package = package_of(module or "")
        return cls(f"{what} needs {package}, which is not installed: {install_command(package)}", name=module)


def package_of(module: str) -> str:
    top = module.partition(".")[0]
    return _PACKAGES.get(top, top.replace("_", "-"))


def install_command(package: str) -> str:
    """Command that installs a package into the current environment.

    It never names an extra of quire: on a package index, that name may belong to another project.
    """
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


class InvariantViolation(QuireError, AssertionError):
    """An invariant of the core does not hold.

    This is a bug in quire, not an error of the caller.
    """


class ModelFileError(QuireError):
    """A model file is damaged, forged, incomplete or of a format quire cannot read."""


class UnsupportedModel(ModelFileError):
    """A valid model whose architecture, tokenizer or tensor type is not supported.

    The message names it and lists what is supported.
    """


class ModelNotFound(QuireError):
    """The name is not a file, a folder, a known model or a model in the cache."""


class DownloadFailed(QuireError):
    """A model could not be downloaded.

    A partial download is never left in place of a complete file.
    """


class LoadFailed(QuireError):
    """A model could not be loaded. A retry may succeed."""


class ModelTooLarge(LoadFailed):
    """A model does not fit into memory next to models that may not be unloaded.

    The message has the sizes.
    """


class CacheFolderError(QuireError):
    """The folder of the disk cache cannot be used.

    The message says why, and what to do.
    """


class TemplateError(QuireError):
    """A chat template is missing, invalid, or exceeded its limits while rendering."""


class TemplateFailure(TemplateError):
    """The template cannot render this conversation, now or later."""


class TemplateRefusal(TemplateFailure):
    """The template called raise_exception: it does not accept the conversation. The message is the template's."""


class RequestFailed(QuireError):
    """One request failed in its sampler, detokenizer or callback.

    Other requests are not affected.
    """


class WorkerDied(QuireError):
    """The worker process crashed or hung.

    Its requests failed; later requests use a new worker.
    """


class LostBeforeStart(WorkerDied):
    """The worker died while this request was waiting.

    The request did not cause it, so a retry is safe.
    """


def error_of(kind: str, message: str) -> QuireError:
    """The exception for an error that another process reported by the name of its class."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, QuireError):
        return found(message)
    return WorkerDied(f"{kind}: {message}")
