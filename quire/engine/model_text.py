"""The text side of a model: tokenizer, chat template and default parameters. No weights, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from quire.core.values import PackedPrompt, Priority
from quire.engine.generation import GenerationParams, GenerationRequest, NewParser, PinPrefix
from quire.errors import ContextTooLong, ModelFileError
from quire.text.chat_template import ChatTemplate, find_boundaries
from quire.text.grammar import Grammar, GrammarKind
from quire.text.messages import AnswerParser, ChatRequest, PlainAnswer, Thought
from quire.text.reasoning import MARKERS, HarmonyParser, Opening, ReasoningFormat, ThoughtParser, find_opening
from quire.text.tokenizer import Detokenizer, Tokenizer
from quire.text.tool_formats import CallParser
from quire.text.tool_grammars import answer_grammar
from quire.weights.checkpoint import TokenizerFiles
from quire.weights.hub import known_generation
from quire.weights.opening import open_checkpoint
from quire.weights.spec import AttentionSpec, GenerationDefaults, ModelSpec

TAIL_TOKENS = 32  # the end of a prompt that is searched for an opened reasoning block
MAX_PREDICTED = 32_768  # tokens of a prediction
MAX_CHARS_PER_TOKEN = 16  # average of a whole text; only long runs of white space exceed it
TOO_LONG_HINT = "shorten it, or serve a model with a longer context"


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
        # Where messages start matters to recurrent states and windows: see quire/core/memory.py.
        has_states = any(not isinstance(layer.mixer, AttentionSpec) for layer in spec.layers)
        self._has_points = has_states or any(spec.windows)
        self.eos_token_ids = tuple(dict.fromkeys((*spec.eos_token_ids, *tokenizer.eos_token_ids)))

    @classmethod
    def open(
        cls,
        path: Path,
        name: str | None = None,
        load_format: str = "auto",
        tool_format: str | None = None,
        *,
        check: Callable[[ModelSpec], None] | None = None,
    ) -> ModelText:
        """Open a model's text files. `tool_format`: a name in TOOL_FORMATS; None: detect it from the template.

        `check` may refuse the model before its tokenizer is read.
        """
        checkpoint = open_checkpoint(path, load_format)
        try:
            if check is not None:
                check(checkpoint.spec)
            files = checkpoint.tokenizer_files()
            tokenizer = make_tokenizer(path, files)
            if tokenizer.vocab_size > checkpoint.spec.vocab_size:
                sizes = f"{tokenizer.vocab_size} tokens, the model only {checkpoint.spec.vocab_size}"
                raise ModelFileError(f"{path}: the tokenizer has {sizes}")
            template = ChatTemplate(files.chat_template, tokenizer, tool_format=tool_format)
            defaults = checkpoint.generation
            if defaults == GenerationDefaults():  # not in the file; known for some models
                defaults = known_generation(path)
            return cls(name or path.stem, checkpoint.spec, defaults, tokenizer, template)
        finally:
            checkpoint.close()

    def encode(self, text: str, max_model_len: int, *, add_special: bool = True) -> tuple[int, ...]:
        """Encode a raw prompt. Control strings in it become control tokens."""
        limit = MAX_CHARS_PER_TOKEN * max_model_len
        if len(text) > limit:
            raise ContextTooLong(
                f"prompt of {len(text)} characters cannot fit the context of {max_model_len} tokens: {TOO_LONG_HINT}"
            )
        return tuple(self.tokenizer.encode(text, add_special=add_special, max_chars=limit))

    def encode_chat(self, chat: ChatRequest, max_model_len: int) -> tuple[int, ...]:
        limit = MAX_CHARS_PER_TOKEN * max_model_len
        if chat.num_chars > limit:  # refused before it is rendered, which takes time
            raise ContextTooLong(
                f"messages of {chat.num_chars} characters cannot fit the context of {max_model_len} tokens:"
                f" {TOO_LONG_HINT}"
            )
        return tuple(self.template.encode(chat, max_chars=limit))

    def request(
        self,
        prompt: Sequence[int],
        params: GenerationParams,
        *,
        priority: Priority = Priority.NORMAL,
        salt: str = "",
        tenant: str = "",
        pins: Sequence[PinPrefix] = (),
        chat: ChatRequest | None = None,
    ) -> GenerationRequest:
        """Make a request. `chat`: the conversation of the prompt; its tools constrain the answer, see `turn_parser`."""
        return GenerationRequest(
            prompt=PackedPrompt.of(prompt),
            sampling=params.sampling(self.defaults, self.eos_token_ids),
            n=params.n,
            stop=params.stops,
            include_stop=params.include_stop,
            skip_special=params.skip_special,
            hides_answer=params.is_empty,
            priority=priority,
            salt=salt,
            tenant=tenant,
            pins=tuple(pins),
            grammar=params.grammar if chat is None else self._grammar(chat, prompt, params.grammar),
            prediction=self._encode_prediction(params.prediction) if params.prediction else None,
            boundaries=find_boundaries(prompt, self.template.starters) if chat is not None and self._has_points else (),
            shown_special=frozenset() if chat is None else self._marker_ids(chat),
        )

    def _encode_prediction(self, text: str) -> PackedPrompt | None:
        """The tokens of an expected answer. The rest of a very long one is not used."""
        limit = MAX_CHARS_PER_TOKEN * MAX_PREDICTED
        tokens = self.tokenizer.encode_plain(text[:limit], at_start=False, max_chars=limit)
        return PackedPrompt.of(tokens[:MAX_PREDICTED]) if tokens else None

    def new_parser(self, chat: ChatRequest | None, prompt: Sequence[int]) -> AnswerParser:
        """A parser for one answer to this prompt, which was rendered from `chat`."""
        if chat is None:
            return PlainAnswer()
        if self._has_channels:
            return HarmonyParser({tool.name for tool in chat.callable_tools}, is_in_final=chat.continue_last)
        parser: AnswerParser = PlainAnswer()
        if tools := chat.callable_tools:
            parser = CallParser(self.template.tool_format, tools)
        thought = self._thought(chat, prompt)
        return parser if thought is None else ThoughtParser(*thought, parser)

    def turn_parser(self, chat: ChatRequest | None, prompt: Sequence[int]) -> NewParser | None:
        """Makes parsers that may end a turn, for a `Generation`. None: without tools the model ends it."""
        return partial(self.new_parser, chat, prompt) if chat is not None and chat.callable_tools else None

    def num_thought_tokens(self, chat: ChatRequest | None, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """The number of reasoning tokens in an answer, markers included."""
        thought = None if chat is None else self._thought(chat, prompt)
        if thought is None or thought[1] is Opening.CLOSED:
            return 0
        assert chat is not None
        detokenizer = Detokenizer(self.tokenizer, shown_special=self._marker_ids(chat))
        if self._has_channels:
            return _num_channel_tokens(detokenizer, answer)
        parser = ThoughtParser(*thought, PlainAnswer())
        has_thought = thought[1] is Opening.OPEN
        for count, token_id in enumerate(answer):
            if not parser.is_thinking:
                return count if has_thought else 0
            has_thought |= any(isinstance(piece, Thought) for piece in parser.push(detokenizer.push((token_id,))))
        return len(answer) if has_thought else 0

    def _grammar(self, chat: ChatRequest, prompt: Sequence[int], text_grammar: Grammar | None) -> Grammar | None:
        if not chat.callable_tools and (text_grammar is None or text_grammar.kind is GrammarKind.TOKENS):
            return text_grammar
        thought = self._thought(chat, prompt)
        return answer_grammar(
            self.template.tool_format, chat.callable_tools, chat.tool_choice, text_grammar, thought, self._control_id
        )

    def _thought(self, chat: ChatRequest, prompt: Sequence[int]) -> tuple[ReasoningFormat, Opening] | None:
        """The model's reasoning format, and whether the prompt opened or closed the reasoning block."""
        format = self.template.reasoning
        if format is None:
            return None
        if self._has_channels:
            return format, Opening.CLOSED if chat.continue_last else Opening.FREE
        if chat.continue_last:
            before, found, after = chat.messages[-1].text.rpartition(format.opening)
            is_open = bool(found) and format.closing not in after
            return format, Opening.OPEN if is_open else Opening.CLOSED if before or after else Opening.FREE
        if not chat.add_generation_prompt:
            return format, Opening.FREE
        return format, find_opening(format, self.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special=False))

    def _marker_ids(self, chat: ChatRequest) -> frozenset[int]:
        """Special tokens that the parser of an answer needs."""
        markers = [*MARKERS] if self._has_channels else []
        if chat.callable_tools and not self._has_channels:
            format = self.template.tool_format
            markers += (format.opening, format.closing, *format.other_markers)
        if self.template.reasoning is not None:
            markers += (self.template.reasoning.opening, self.template.reasoning.closing)
        return frozenset(self.tokenizer.added[marker] for marker in markers if marker in self.tokenizer.added)

    @property
    def _has_channels(self) -> bool:
        return self.template.reasoning is not None and self.template.reasoning.has_channels

    def _control_id(self, marker: str) -> int | None:
        token_id = self.tokenizer.added.get(marker)
        return token_id if token_id in self.tokenizer.control_ids else None

    def close(self) -> None:
        self.template.close()
        self.tokenizer.close()


def _num_channel_tokens(detokenizer: Detokenizer, answer: Sequence[int]) -> int:
    """The tokens of reasoning messages, headers included."""
    parser = HarmonyParser(())
    num_thought = num_header = 0
    for token_id in answer:
        parser.push(detokenizer.push((token_id,)))
        num_header += 1
        if parser.is_thinking:
            num_thought += num_header
        if not parser.is_in_header:
            num_header = 0
    return num_thought


def make_tokenizer(path: Path, files: TokenizerFiles) -> Tokenizer:
    if files.tokenizer_json is not None:
        return Tokenizer.from_json(files.tokenizer_json, files.config)
    if files.gguf is not None:
        return Tokenizer.from_gguf(files.gguf)
    raise ModelFileError(f"{path}: has no tokenizer.json: only an Engine with token ids can run it")
