"""A model as the side that talks to people sees it: its words, its template, its defaults. No weights, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.core.request import Priority
from quire.engine.params import GenerationParams, GenerationRequest, PinPrefix
from quire.errors import ContextTooLong, InvalidRequest, ModelFileError
from quire.text.chat import ChatRequest, ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import TokenizerFiles
from quire.weights.hub import known_generation
from quire.weights.opening import open_checkpoint
from quire.weights.spec import GenerationDefaults, ModelSpec

MAX_CHARS_PER_TOKEN = 16  # on average: a text with more is too long for any vocabulary, but for pages of blanks


class ModelText:
    """Turns prompts and conversations into generation requests for one model."""

    def __init__(
        self, name: str, spec: ModelSpec, defaults: GenerationDefaults, tokenizer: Tokenizer, template: ChatTemplate
    ) -> None:
        self.name = name
        self.spec = spec
        self.defaults = defaults
        self.tokenizer = tokenizer
        self.template = template
        self.eos_token_ids = tuple(dict.fromkeys((*spec.eos_token_ids, *tokenizer.eos_token_ids)))

    @classmethod
    def open(cls, path: Path, name: str | None = None, load_format: str = "auto") -> ModelText:
        checkpoint = open_checkpoint(path, load_format)
        try:
            files = checkpoint.tokenizer_files()
            tokenizer = make_tokenizer(path, files)
            if tokenizer.vocab_size > checkpoint.spec.vocab_size:
                sizes = f"{tokenizer.vocab_size} tokens, the model only {checkpoint.spec.vocab_size}"
                raise ModelFileError(f"{path}: the tokenizer has {sizes}")
            template = ChatTemplate(files.chat_template, tokenizer)
            defaults = checkpoint.generation
            if defaults == GenerationDefaults():  # the file says nothing; of some models we know
                defaults = known_generation(path)
            return cls(name or path.stem, checkpoint.spec, defaults, tokenizer, template)
        finally:
            checkpoint.close()

    def encode(self, text: str, max_context: int) -> tuple[int, ...]:
        """A raw prompt. Control strings in it are control tokens: it is the caller's whole prompt."""
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt = {text!r:.80} is not text")
        limit = MAX_CHARS_PER_TOKEN * max_context
        if len(text) > limit:
            raise ContextTooLong(
                f"prompt of {len(text)} characters is more than {limit} = {MAX_CHARS_PER_TOKEN} for each of the"
                f" {max_context} tokens of context"
            )
        return tuple(self.tokenizer.encode(text))

    def encode_chat(self, chat: ChatRequest, max_context: int) -> tuple[int, ...]:
        num_chars = sum(len(message.text) for message in chat.messages)
        limit = MAX_CHARS_PER_TOKEN * max_context
        if num_chars > limit:
            raise ContextTooLong(
                f"messages of {num_chars} characters are more than {limit} = {MAX_CHARS_PER_TOKEN} for each of the"
                f" {max_context} tokens of context"
            )
        return tuple(self.template.encode(chat))

    def request(
        self,
        prompt: Sequence[int],
        params: GenerationParams,
        *,
        priority: Priority = Priority.NORMAL,
        salt: str = "",
        pins: Sequence[PinPrefix] = (),
    ) -> GenerationRequest:
        return GenerationRequest(
            prompt=tuple(prompt),
            sampling=params.sampling(self.defaults, self.eos_token_ids),
            n=params.n,
            stop=params.stops,
            include_stop=params.include_stop,
            skip_special=params.skip_special,
            priority=priority,
            salt=salt,
            pins=tuple(pins),
            grammar=params.grammar,
        )

    def close(self) -> None:
        self.template.close()


def make_tokenizer(path: Path, files: TokenizerFiles) -> Tokenizer:
    if files.tokenizer_json is not None:
        return Tokenizer.from_json(files.tokenizer_json, files.config)
    if files.gguf is not None:
        return Tokenizer.from_gguf(files.gguf)
    raise ModelFileError(f"{path}: has no tokenizer.json: without it there is no text, only token ids for an Engine")
