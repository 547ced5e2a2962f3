"""A model's chat template: turns a conversation into token ids.

Only the template may write control tokens. `<|im_end|>` in a message is encoded as plain text: see ChatTemplate.
`Renderer` runs the template in a child process that can be killed. Short trial conversations find out which turns it
accepts (`find_rules`), and which tokens start a message (`find_starters`): recurrent states are stored at these
positions, because the next request of a conversation often has the same tokens up to one of them.

Tools, calls and results are template variables, or text if the template does not support tools. The format of a model's
tool calls is found by a trial as well: its template renders a call, and the format's parser must read it back.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from quire.errors import InvalidRequest, RequestFailed, TemplateError, TemplateFailure, TemplateRefusal
from quire.text.child_process import LimitedChild, NoAnswer
from quire.text.messages import (
    AnswerParser,
    CallArguments,
    CallStart,
    ChatRequest,
    Message,
    Part,
    Role,
    Tool,
    ToolCall,
    ToolMode,
)
from quire.text.reasoning import CHANNEL, SWITCHES, HarmonyParser, find_reasoning
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats import (
    PROMPTED,
    TOOL_FORMATS,
    CallParser,
    Syntax,
    ToolFormat,
    decoded_json,
    named_tool_format,
)
from quire.text.vocab_spec import AddedToken

# How a template reads the reasoning of an earlier message, if not from `reasoning_content`.
_READS_THINKING = re.compile(r"""\bmessage(?:\.thinking\b|\[['"]thinking['"]\])|['"]thinking['"] in message\b""")
# Templates of models with channels write any effort into the prompt; the models know three.
_CHANNEL_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
# Templates that have no place for text before a call: gpt-oss writes it as reasoning, and refuses text and reasoning
# together; Gemma 4 writes it after the results and ends the turn there. It is given to them as reasoning.
_REASONED_CALLS = (Syntax.HARMONY, Syntax.GEMMA)
_EFFORTS = ("low", "medium", "high", "xhigh", "max")  # that ask for reasoning
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # planes 15 and 16


class ChatTemplate:
    """A model's chat template over its tokenizer.

    Before rendering, a marker character is inserted after the first character of every control string in the client's
    text, so that it no longer matches a control token. After rendering, the text between the template's own control
    tokens is encoded without the markers and without control tokens. A conversation without control strings, the
    usual case, needs a single plain encode of the rendered text. No BOS is added, as in transformers: the template
    writes it.

    In assistant messages only special tokens are marked, because templates look for `</think>` and similar strings
    there. Tool descriptions and call arguments are marked like user messages.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        *,
        tool_format: str | None = None,
    ) -> None:
        """`tool_format`: the name of a row of TOOL_FORMATS. None: detect it by a trial."""
        self._tool_format = None if tool_format is None else named_tool_format(tool_format)
        self.reasoning = find_reasoning(source)
        self._has_thinking_key = bool(source and _READS_THINKING.search(source))
        self._has_calls = bool(source and "tool_calls" in source)
        self.source = source  # None: the model has no template
        self._tokenizer = tokenizer
        self._renderer = None if source is None else Renderer(source)
        self._all = _Finder(tokenizer.control)
        self._special = _Finder(token for token in tokenizer.control if token.special)

    @property
    def tool_format(self) -> ToolFormat:
        """The given format, or the one that trials find at first use. Raises TemplateError if they do not end."""
        if self._tool_format is None:
            self._tool_format = detect_tool_format(self.source, self._render_with)
        return self._tool_format

    def check(self) -> None:
        """Compile the template and render a trial, so that errors are found at load. Raises TemplateError."""
        with suppress(TemplateRefusal):  # the template works, but refuses this conversation
            self._render_with({"messages": [{"role": "user", "content": "Hi"}]})

    def encode(self, request: ChatRequest, *, max_chars: int | None = None) -> list[int]:
        """The prompt's token ids. Raises TemplateError, or ContextTooLong for more than `max_chars` characters."""
        text, marker = self._render(request)
        return self._tokenizer.encode_marked(text, marker, max_chars=max_chars)

    def render(self, request: ChatRequest) -> str:
        """The prompt as text, for display only: encoding it turns control strings in messages into control tokens."""
        text, marker = self._render(request)
        return text.replace(marker, "")

    @property
    def switch(self) -> str | None:
        """The template variable that switches reasoning on or off, if there is one."""
        known = self._variables()
        return next((name for name in SWITCHES if name in known), None)

    def can_think(self, wants: bool | None) -> bool:
        """Whether this reasoning setting can be met. True: on; False: off; None: an effort.

        Without a switch, only the model's fixed behaviour can be met.
        """
        if wants is None:
            return "reasoning_effort" in self._variables()
        return self.switch is not None or (self.reasoning is not None) == wants

    @cached_property
    def starters(self) -> tuple[int, ...]:
        """The control tokens that start a message, found by trials at first use. Empty: none, or no trial succeeded."""
        special = {token.content: token.token_id for token in self._tokenizer.control if token.special}
        try:
            return find_starters(
                lambda messages, add: self._render_with({"messages": messages, "add_generation_prompt": add}), special
            )
        except (TemplateError, RequestFailed):
            return ()

    def unknown_args(self, args: Iterable[str]) -> list[str]:
        """The names that the template does not use, so that setting them has no effect."""
        return [name for name in args if name not in self._variables()]

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def _render(self, request: ChatRequest) -> tuple[str, str]:
        tools = () if request.tool_choice.mode is ToolMode.NONE else request.tools
        messages: Sequence[Message] = request.messages
        if tools or any(message.tool_calls or message.role is Role.TOOL for message in messages):
            if not self.tool_format.is_in_template:
                messages, tools = tools_as_text(messages, tools, self.tool_format), ()
            elif self.tool_format.is_single:
                messages = one_call_each(messages)
        rules = TurnRules() if is_plain(messages) else self._turn_rules
        try:
            return self._render_turns(request, merge_turns(messages, rules), tools)
        except TemplateRefusal:
            # Retry without the effort, which is only a hint, and with stricter rules: trials do not find every refusal.
            other = replace(request, reasoning_effort=None)
            for other_rules in (rules, replace(STRICTEST, puts_system_last=rules.puts_system_last)):
                with suppress(TemplateError):
                    return self._render_turns(other, merge_turns(messages, other_rules), tools)
            raise

    def _render_turns(
        self, request: ChatRequest, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[str, str]:
        entries = self._entries(messages)
        unknown = self.unknown_args(request.template_args)
        variables: dict[str, Any] = {
            name: value for name, value in request.template_args.items() if name not in unknown
        }
        if tools:
            variables["tools"] = [template_tool(tool) for tool in tools]
        texts = [self.source or ""]
        _with_strings([entries, variables], texts.append)
        marker, end = _unused_characters(texts)
        mark = partial(self._all.mark, marker=marker)
        variables = {name: _with_strings(value, mark) for name, value in variables.items()}
        variables["messages"] = [self._marked_entry(entry, marker) for entry in entries]
        variables["add_generation_prompt"] = request.add_generation_prompt
        if request.continue_last:
            variables["messages"][-1]["content"] += end + " "
        variables = {**self._switches(request), **variables}
        rendered = self._render_with(variables)
        return (_cut(rendered, end) if request.continue_last else rendered), marker

    def _entries(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as template variables. Absent fields have no key."""
        names = {call.call_id: call.name for message in messages for call in message.tool_calls}
        entries: list[dict[str, Any]] = []
        for message in messages:
            entry: dict[str, Any] = {"role": message.role.value, "content": message.text}
            if message.name is not None:
                entry["name"] = message.name
            thought = message.thought
            if message.tool_calls:
                entry["tool_calls"] = [template_call(call, self.tool_format) for call in message.tool_calls]
                if self.tool_format.syntax in _REASONED_CALLS and message.text:
                    entry["content"], thought = "", "\n\n".join(filter(None, (thought, message.text)))
            if thought:
                entry["reasoning_content"] = thought
                if self._has_thinking_key:
                    entry["thinking"] = thought
            if message.tool_call_id is not None:
                entry["tool_call_id"] = fitting_id(message.tool_call_id, self.tool_format)
                if message.tool_call_id in names:
                    entry.setdefault("name", names[message.tool_call_id])
            entries.append(entry)
        return entries

    def _marked_entry(self, entry: dict[str, Any], marker: str) -> dict[str, Any]:
        finder = self._special if entry["role"] == Role.ASSISTANT else self._all
        marked = {"role": entry["role"], "content": finder.mark(entry["content"], marker)}
        if "tool_calls" in entry and self.tool_format.syntax is Syntax.PYTHON and not self._has_calls:
            calls = [python_call(call["function"]) for call in entry["tool_calls"]]
            opening, closing = self.tool_format.opening, self.tool_format.closing
            marked["content"] = f"{opening}[{self._all.mark(', '.join(calls), marker)}]{closing}{marked['content']}"
        mark = partial(self._all.mark, marker=marker)
        return marked | {name: _with_strings(value, mark) for name, value in entry.items() if name not in marked}

    def _switches(self, request: ChatRequest) -> dict[str, Any]:
        """The template variables that control reasoning, as far as the template uses them."""
        found: dict[str, Any] = {}
        if request.wants_thought is None and request.reasoning_effort is None:
            return found
        wants, effort, switch = request.wants_thought, request.reasoning_effort, self.switch
        has_effort = "reasoning_effort" in self._variables()
        if wants is None and effort in _EFFORTS and not has_effort:
            wants = True  # how much cannot be set
        if switch is not None and wants is not None:
            found[switch] = wants
        if self.reasoning is not None and self.reasoning.has_channels:
            effort = "low" if effort is None and wants is False else _CHANNEL_EFFORTS.get(effort or "", effort)
        if effort is not None and has_effort:
            found["reasoning_effort"] = effort
        return found

    def _variables(self) -> frozenset[str]:
        return frozenset() if self._renderer is None else self._renderer.variables

    @cached_property
    def _turn_rules(self) -> TurnRules:
        """The template's rules, found by trials when a conversation first needs them."""
        tools = [template_tool(Tool("trial"))] if self.tool_format.is_in_template else None
        return find_rules(lambda entries: self._render_with({"messages": list(entries), "tools": tools}))

    def _render_with(self, variables: Mapping[str, Any]) -> str:
        if self._renderer is None:
            raise TemplateError("this model has no chat template: send it a prompt as a raw completion instead")
        everything = {**self._tokenizer.special_tokens, "tools": None, "documents": None, **variables}
        everything.setdefault("add_generation_prompt", True)
        try:
            return self._renderer.render(everything)
        except TemplateFailure as error:
            if isinstance(error, TemplateRefusal) or everything["tools"] is not None:
                raise
        return self._renderer.render(
            {**everything, "tools": []}
        )  # some templates read the list of tools even if there are none


class _Finder:
    """Finds control strings in a text. The time depends on the text, not on the number of control strings."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._strings = frozenset(token.content for token in tokens)
        self._sizes: dict[str, set[int]] = {}  # of the strings, by their first two characters
        for string in self._strings:
            self._sizes.setdefault(string[:2], set()).add(len(string))
        self._prefixes = frozenset(string[:size] for string in self._strings for size in range(1, len(string)))
        self._longest = max(map(len, self._prefixes), default=0)
        # A set of characters: alternatives would be tried one after the other at every character of a text.
        starts = "".join(re.escape(start) for start in sorted({start[0] for start in self._sizes}))
        self._pattern = re.compile(f"[{starts}]") if starts else None

    def mark(self, text: str, marker: str) -> str:
        """The text with `marker` inserted after the first character of each control string.

        A marker is also appended if the text ends with a prefix of a control string, which the template's next
        characters could complete.
        """
        if self._pattern is None:
            return text
        pieces: list[str] = []
        done = 0
        for match in self._pattern.finditer(text):
            at = match.start()
            if any(text[at : at + size] in self._strings for size in self._sizes.get(text[at : at + 2], ())):
                pieces += (text[done : at + 1], marker)
                done = at + 1
        pieces.append(text[done:])
        if any(text[-size:] in self._prefixes for size in range(1, min(self._longest, len(text)) + 1)):
            pieces.append(marker)
        return "".join(pieces)


def _cut(rendered: str, end: str) -> str:
    """The text up to the end of the last message, stripped if the template stripped that message."""
    at = rendered.rfind(end)
    if at < 0:
        raise TemplateError("continue_last: this model's template does not write the last message unchanged")
    is_kept = rendered[at : at + 2] == end + " "
    return rendered[:at] if is_kept else rendered[:at].rstrip()


def _with_strings(value: Any, change: Callable[[str], object]) -> Any:
    """The value with what `change` returns for each of its strings, keys included."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(str(name)): _with_strings(item, change) for name, item in value.items()}
        case list() | tuple():
            return [_with_strings(item, change) for item in value]
        case _:
            return value


def _unused_characters(texts: Sequence[str]) -> tuple[str, str]:
    """The first two private-use characters that occur in none of the texts."""
    used = {char for text in texts if not text.isascii() for char in set(text) if ord(char) >= 0xF0000}
    free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
    first, second = next(free, None), next(free, None)
    if first is None or second is None:
        raise InvalidRequest("messages use every private-use character of Unicode")
    return first, second


RENDER_LIMIT_S = 1.0  # CPU time
COMPILE_LIMIT_S = 1.0  # CPU time; with a trial render, a hostile template takes 2 s at most
MAX_MEMORY_BYTES = 512 << 20  # of address space; Python with Jinja uses about 50 MiB of it
_BREAKING = {
    "MemoryError": f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory",
    "RecursionError": "it nests too deeply",
}
_WORKER = Path(__file__).with_name("template_worker.py")


class Renderer(LimitedChild):
    """One template and the child process that renders it."""

    def __init__(self, source: str) -> None:
        names = ("the process that renders chat templates", "the chat template")
        first = {"source": source, "max_bytes": MAX_MEMORY_BYTES}
        super().__init__(_WORKER, first, COMPILE_LIMIT_S, names=names, failure=TemplateError, check=_check_rendering)

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself."""
        if not self.first_answer:
            self.warm_up()
        return frozenset(map(str, self.first_answer.get("variables", ())))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises TemplateError, or RequestFailed if other processes end the child twice."""
        return str(self.request({"variables": dict(variables)}, RENDER_LIMIT_S)["text"])


def _check_rendering(order: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Check an answer without trusting it: a template that escaped its sandbox could write anything."""
    error, kind = answer.get("error"), str(answer.get("kind"))
    if isinstance(error, str) and kind == "Refusal":
        raise TemplateRefusal(error)
    if kind in _BREAKING:  # the state of the process is undefined
        raise NoAnswer(f"failed: {_BREAKING[kind]}")
    if isinstance(error, str):
        raise TemplateFailure(f"the chat template failed: {kind}: {error[:500]}")
    name, expected = ("text", str) if "variables" in order else ("variables", list)
    if error is not None or not isinstance(answer.get(name), expected):
        raise NoAnswer("wrote an invalid answer")


_BETWEEN = {"user": "\n\n", "system": "\n\n", "assistant": ""}  # an assistant's text is continued without a break

Entry = dict[str, Any]  # a message as a template variable
RenderTurns = Callable[[Sequence[Entry]], str]  # raises TemplateFailure


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The turns a template accepts and writes into the prompt."""

    takes_system: bool = True  # a system turn at the start
    keeps_system: bool = True  # that turn, if the conversation ends with a tool's result or an answer
    takes_late_system: bool = True  # a system turn that is not at the start, or a second one
    takes_neighbours: bool = True  # two turns of one role in a row
    takes_user_after_tool: bool = True  # a user turn directly after a tool's result
    puts_system_last: bool = False  # the system text becomes part of the last user turn


STRICTEST = TurnRules(False, False, False, False, False)


def find_rules(render: RenderTurns) -> TurnRules:
    """Find the rules by trials. Rules about turns that the template never renders, such as tool results, stay True.

    Raises TemplateError if a trial is inconclusive because the rendering process ended or took too long.
    """

    def rendered(*turns: Entry) -> str:
        try:
            return render(turns)
        except TemplateFailure:
            return ""

    def takes(*turns: Entry) -> bool:
        text = rendered(*turns)
        return all(turn["content"] in text for turn in turns)

    def turn(role: str, number: str, **more: Any) -> Entry:
        return {"role": role, "content": f"trial{number}", **more}

    first, answer, last = turn("user", "one"), turn("assistant", "two"), turn("user", "three")
    system, late = turn("system", "four"), turn("system", "five")
    call = {"id": "trialcall", "type": "function", "function": {"name": "trial", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = turn("tool", "six", tool_call_id="trialcall", name="trial")
    if not takes(first):
        return TurnRules()  # trials are inconclusive
    takes_system = takes(system, first)
    talk = rendered(system, first, called, result, answer, last) or rendered(system, first, answer, last)
    ends = [turns for turns in ((first, called, result), (first, answer)) if takes(*turns)]
    return TurnRules(
        takes_system,
        not takes_system or all(takes(system, *end) for end in ends),
        takes_system and takes(system, late, first) and takes(first, late, answer, last) and takes(first, late),
        takes(first, last) and takes(first, answer, turn("assistant", "seven"), last),
        (first, called, result) not in ends or takes(first, called, result, last),
        system["content"] in talk.partition(answer["content"])[2],
    )


def is_plain(messages: Sequence[Message]) -> bool:
    """Whether user and assistant alternate, which every template accepts."""
    roles = [message.role.value for message in messages]
    return all(role == ("assistant" if i % 2 else "user") for i, role in enumerate(roles))


def merge_turns(messages: Sequence[Message], rules: TurnRules) -> list[Message]:
    """The same conversation in turns that the rules allow. No text is omitted."""
    turns, has_moved = _without_late_systems(messages, rules)
    if not rules.takes_user_after_tool:
        turns = _joined(turns, lambda last, turn: last.role == "tool" and turn.role == "user")
    num_leading = _num_leading_systems(turns)
    if num_leading and not _keeps_system(turns, rules):
        systems = [replace(turn, role=Role.USER) for turn in turns[:num_leading]]
        at = num_leading
        if rules.puts_system_last:
            at = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=at)
        turns, has_moved = [*turns[num_leading:at], *systems, *turns[at:]], True
    if has_moved or not rules.takes_neighbours:
        turns = _joined(turns, lambda last, turn: last.role == turn.role != "tool" and not last.tool_calls)
    return turns


def _without_late_systems(messages: Sequence[Message], rules: TurnRules) -> tuple[list[Message], bool]:
    """Merge system turns that are not allowed into the first one, or make them user turns.

    Also returns whether any of them became a user turn.
    """
    num_leading = _num_leading_systems(messages)
    turns = list(messages[:num_leading])
    if num_leading > 1 and not rules.takes_late_system:
        turns = _joined(turns, lambda last, turn: last.role == turn.role)
    has_moved = False
    for message in messages[num_leading:]:
        if message.role == "system" and not rules.takes_late_system:
            message, has_moved = replace(message, role=Role.USER), True
        turns.append(message)
    return turns, has_moved


def _num_leading_systems(turns: Sequence[Message]) -> int:
    return next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))


def _keeps_system(turns: Sequence[Message], rules: TurnRules) -> bool:
    """Whether the template writes a system turn at the start of these turns."""
    if not rules.takes_system or rules.keeps_system:
        return rules.takes_system
    has_results = any(turn.role == "tool" for turn in turns)
    return turns[-1].role == "user" and (rules.puts_system_last or not has_results)


def _joined(turns: Sequence[Message], belong: Callable[[Message, Message], bool]) -> list[Message]:
    """The turns, each merged into the previous one if it belongs to it."""
    joined: list[Message] = []
    for turn in turns:
        if not joined or not belong(joined[-1], turn):
            joined.append(turn)
            continue
        last = joined[-1]
        between = _BETWEEN[turn.role] if last.text and turn.text else ""
        joined[-1] = replace(
            last,
            parts=(*last.parts, *((Part(between),) if between else ()), *turn.parts),
            thought=last.thought + turn.thought,
            tool_calls=(*last.tool_calls, *turn.tool_calls),
        )
    return joined


MAX_BOUNDARIES = 64
_TRIAL_TEXTS = ("trialone", "trialtwo", "trialthree")
NUM_FIRST = 4  # of the kept boundaries: the end of the system text is among them

RenderMessages = Callable[[Sequence[Mapping[str, Any]], bool], str]  # messages, add_generation_prompt -> text


def find_boundaries(tokens: Sequence[int], starters: Collection[int]) -> tuple[int, ...]:
    """The positions of tokens that start a message, ascending. At most MAX_BOUNDARIES: the first 4 and the last 60.

    The start of the first message is left out: nothing is before it, or only one token such as BOS.
    """
    found: list[int] = []
    for starter in starters:
        at = 1
        try:
            while True:
                at = tokens.index(starter, at + 1)
                found.append(at)
        except ValueError:  # no further one
            pass
    found.sort()
    if len(found) > MAX_BOUNDARIES:
        found = [*found[:NUM_FIRST], *found[NUM_FIRST - MAX_BOUNDARIES :]]
    return tuple(found)


def find_starters(render: RenderMessages, control: Mapping[str, int]) -> tuple[int, ...]:
    """The control tokens that start a message, found by rendering a short trial conversation. Empty: there are none.

    `control`: the control strings and their ids. After a message's text comes the control token that ends it, if there
    is one; the next one starts the following message. Raises TemplateError.
    """
    user, answer = {"role": "user", "content": _TRIAL_TEXTS[0]}, {"role": "assistant", "content": _TRIAL_TEXTS[1]}
    strings = re.compile("|".join(re.escape(one) for one in sorted(control, key=len, reverse=True)) or "(?!)")
    endings: set[str] = set()
    for messages in ([user], [user, answer]):
        tail = render(messages, False).rpartition(messages[-1]["content"])[2]
        endings |= set(strings.findall(tail)[:1])
    rest = render([user, answer, {"role": "user", "content": _TRIAL_TEXTS[2]}], True)
    starters: dict[str, None] = {}
    for i, text in enumerate(_TRIAL_TEXTS):
        before, found, rest = rest.partition(text)
        if not found:
            return ()
        if i > 0:
            starters |= dict.fromkeys(_first_other(strings.findall(before), endings))
    starters |= dict.fromkeys(_first_other(strings.findall(rest), endings))  # the start of the answer
    return tuple(control[one] for one in starters)


def _first_other(found: list[str], endings: Collection[str]) -> list[str]:
    return [one for one in found if one not in endings][:1]


NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

_INSTRUCTIONS = """You can use these tools, each with a JSON schema of its arguments:
{tools}

To use a tool, write its name and arguments like this, once for each call:
<tool_call>
{{"name": "the name", "arguments": {{"the first argument": "its value"}}}}
</tool_call>
Results come back inside <tool_response>. If no tool is needed, answer in plain words."""


def template_tool(tool: Tool) -> dict[str, Any]:
    """A tool as a template variable, in the format of OpenAI's protocol."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters or NO_PARAMETERS}
    return {"type": "function", "function": function}


def template_call(call: ToolCall, format: ToolFormat) -> dict[str, Any]:
    """A call as a template variable, with its arguments as a mapping."""
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"id": fitting_id(call.call_id, format), "type": "function", "function": function}


def fitting_id(call_id: str, format: ToolFormat) -> str:
    """The call id, or a hash of it with the length that the template requires."""
    if format.id_chars is None or (len(call_id) == format.id_chars and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[: format.id_chars]


def python_call(function: Mapping[str, Any]) -> str:
    """A call as LFM2 writes it, for templates that do not render earlier calls. `function`: name and arguments."""
    arguments = [f"{name}={python_value(value)}" for name, value in function["arguments"].items()]
    return f"{function['name']}({', '.join(arguments)})"


def python_value(value: object) -> str:
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The conversation with at most one call in a message, each followed by its result: some templates need this."""
    split: list[Message] = []
    waiting: list[Message] = []  # the other calls of the last message with calls
    for message in messages:
        if message.role is Role.TOOL:
            ids = [one.tool_calls[0].call_id for one in waiting]
            if message.tool_call_id in ids:
                split.append(waiting.pop(ids.index(message.tool_call_id)))
        else:
            split += waiting
            waiting = []
        if len(message.tool_calls) > 1:
            first, *others = message.tool_calls
            split.append(replace(message, tool_calls=(first,)))
            waiting = [Message(Role.ASSISTANT, (), tool_calls=(call,)) for call in others]
        else:
            split.append(message)
    return [*split, *waiting]


def tools_as_text(messages: Sequence[Message], tools: Sequence[Tool], format: ToolFormat) -> list[Message]:
    """The conversation without tool messages and calls, with the tools described in the system message."""
    written: list[Message] = []
    is_results = False  # the last message was made from tool results
    for message in messages:
        if message.role is Role.TOOL:
            result = Part(f"<tool_response>\n{message.text}\n</tool_response>")
            if is_results:
                written[-1] = replace(written[-1], parts=(*written[-1].parts, Part("\n"), result))
            else:
                written.append(Message(Role.USER, (result,)))
        elif is_results and message.role is Role.USER:  # many templates require alternating turns
            written[-1] = replace(written[-1], parts=(*written[-1].parts, Part("\n\n"), *message.parts))
        elif message.tool_calls:
            written.append(replace(message, parts=(*message.parts, Part(_calls(message, format))), tool_calls=()))
        else:
            written.append(message)
        is_results = message.role is Role.TOOL
    if not tools:
        return written
    text = Part(_INSTRUCTIONS.format(tools="\n".join(json.dumps(_short(tool), ensure_ascii=False) for tool in tools)))
    if written and written[0].role is Role.SYSTEM:
        return [replace(written[0], parts=(*written[0].parts, Part("\n\n"), text)), *written[1:]]
    return [Message(Role.SYSTEM, (text,)), *written]


def _short(tool: Tool) -> dict[str, Any]:
    about = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **about, "parameters": tool.parameters or NO_PARAMETERS}


def _calls(message: Message, format: ToolFormat) -> str:
    calls = [
        format.opening
        + format.before
        + json.dumps({"name": call.name, format.arguments: json.loads(call.arguments)}, ensure_ascii=False)
        + format.after
        + format.closing
        for call in message.tool_calls
    ]
    return ("\n" if message.text else "") + "\n".join(calls)


RenderTrial = Callable[[Mapping[str, Any]], str]  # template variables to text; raises TemplateFailure

MAX_ANSWER_CHARS = 16_384  # of a trial: a template may write megabytes, which every parser would read
_USES_TOOLS = re.compile(r"\{%[^%]*\btools\b")  # only in statements: in literal text it may be an ordinary word
_ARGUMENTS = {"trial_text": "trial value", "trial_number": 3}
_PROPERTIES = {
    "trial_text": {"type": "string", "description": "A text."},
    "trial_number": {"type": "integer", "description": "A number."},
}
_TOOL = Tool("trial_tool", "Trial.", {"type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES)})
_QUESTION = "trial question"
_ID = "trialcall"  # of nine characters, which the templates of Mistral require
_ASKED = {"role": "user", "content": _QUESTION}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _ID, "type": "function", "function": {"name": _TOOL.name, "arguments": _ARGUMENTS}}],
}
_RESULT = {"role": "tool", "content": "trial result", "tool_call_id": _ID, "name": _TOOL.name}


def detect_tool_format(source: str | None, render: RenderTrial) -> ToolFormat:
    """The format whose parser reads a call as the template writes it; `PROMPTED` if there is none.

    A template that does not write earlier calls shows no format. Such a template of LFM2 is known by its source,
    because quire can write the calls of this format itself.

    Raises TemplateError if the trial is inconclusive because the rendering process ended or took too long.
    """
    if source is None or not _USES_TOOLS.search(source):
        return PROMPTED
    if "tool_calls" not in source:
        return next((row for row in TOOL_FORMATS if any(sign in source for sign in row.signs)), PROMPTED)
    answer = _rendered_call(render)
    return next((row for row in TOOL_FORMATS if row.is_in_template and _reads(row, answer)), PROMPTED)


def _rendered_call(render: RenderTrial) -> str:
    """A call as the template writes it, with the text around it in that turn. Empty: it refuses or omits calls."""
    tools = [template_tool(_TOOL)]

    def rendered(*messages: Mapping[str, Any], is_open: bool = False) -> str:
        try:
            return render({"messages": list(messages), "tools": tools, "add_generation_prompt": is_open})
        except TemplateFailure:
            return ""

    prompt = rendered(_ASKED, is_open=True)
    text = rendered(_ASKED, _CALLED) or rendered(_ASKED, _CALLED, _RESULT)
    is_continued = bool(prompt) and text.startswith(prompt)
    answer = text.removeprefix(prompt) if is_continued else text.rpartition(_QUESTION)[2]
    return answer[:MAX_ANSWER_CHARS]


def _reads(format: ToolFormat, answer: str) -> bool:
    """Whether the format's parser finds exactly the trial call, between the format's own markers."""
    parser: AnswerParser
    if format.syntax is Syntax.HARMONY:
        parser, markers = HarmonyParser((_TOOL.name,)), [CHANNEL]
    else:
        parser = CallParser(format, (_TOOL,))
        markers = [format.closing] if format.may_be_bare else [format.opening, format.closing]
    pieces = [*parser.push(answer), *parser.finish()]
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    has_markers = all(marker in answer for marker in markers)
    return has_markers and names == [_TOOL.name] and decoded_json(arguments) == _ARGUMENTS
