"""Fields of Ollama's API that quire does not support. See `quire/server/protocols/support.py`.

Options that only configure Ollama's own runner are accepted, and named in `x-quire-ignored-fields`.
"""

from __future__ import annotations

from msgspec import Meta

from quire.server.protocols.shape_fields import SHAPE_FIELDS
from quire.server.protocols.support import Unsupported, describe_accepted, describe_refused

_SHAPE = "use format: json, or a JSON schema"
_SAMPLER = "quire does not have this sampler"

# Fields of a body, of a message and of options.
UNSUPPORTED = {
    "images": Unsupported("only text input is supported", ([],)),
    "suffix": Unsupported("the models generate at the end of the prompt only", ("",)),
    "template": Unsupported("a request cannot bring its own template; the model's is used", ("",)),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "typical_p": Unsupported(_SAMPLER, (1,)),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
    **{name: Unsupported(_SHAPE, harmless) for name, harmless in SHAPE_FIELDS.items()},
}

_LOADING = "the server sets this when it loads a model"
_OLD = "current versions of Ollama do not read it"

IGNORED_OPTIONS = {
    "num_gpu": _LOADING,
    "main_gpu": _LOADING,
    "num_thread": _LOADING,
    "num_batch": _LOADING,
    "use_mmap": _LOADING,
    "use_mlock": _LOADING,
    "numa": _LOADING,
    "low_vram": _LOADING,
    "draft_num_predict": _LOADING,
    "num_keep": "contexts are never shifted",
    "mirostat_tau": "quire does not have mirostat",
    "mirostat_eta": "quire does not have mirostat",
    "f16_kv": _OLD,
    "logits_all": _OLD,
    "vocab_only": _OLD,
    "embedding_only": _OLD,
    "penalize_newline": _OLD,
}


def refused(field: str) -> Meta:
    return describe_refused(UNSUPPORTED[field])


def ignored(option: str) -> Meta:
    return describe_accepted(IGNORED_OPTIONS[option])
