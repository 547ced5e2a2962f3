r"""Translates JSON Schema's `pattern` (JavaScript regular expressions) to the grammar compiler's dialect. Pure.

The dialects differ in the meaning of `.`, `\s`, `[a&&b]` and `$`, so a pattern is parsed and rewritten. An assertion
without a counterpart (look-around, `\b`, back-reference) is omitted: the result allows more, never less, and
`HeldPattern.problem` names the omission.

No class matches U+0000: llguidance 1.9 treats a class with all 32 control characters as one with every escaped
character, so `[^"]` would allow a quote. It merges the classes of one alternative, so this holds for all of them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

MAX_REPEATS = 10_000  # of one atom, multiplied over nested groups: the compiler unrolls them
MAX_NESTING = 64  # of groups

_LAST = 0x10FFFF
_NUL = r"\x{0}"
_REST = "(?s:.*)"
_NOTHING = r"[^\x{0}-\x{10FFFF}]"
_SPACE = r"\x{9}-\x{D}\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_CLASSES = {"d": "0-9", "w": "0-9A-Z_a-z", "s": _SPACE}
_CONTROLS = {"0": 0x00, "t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d+)(?:(,)(\d*))?\})\??")
_GROUP = re.compile(r"\((?:(\?)(?:(:)|(=|!|<=|<!)|P?<[A-Za-z_$][\w$]*>)?)?")
_CLASS = re.compile(r"\[(\^?)((?:[^\]\\]|\\.)*)\]", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:u(?P<high>[Dd][89ABab][0-9A-Fa-f]{2})\\u(?P<low>[Dd][C-Fc-f][0-9A-Fa-f]{2})"
    r"|(?:u\{(?P<long>[0-9A-Fa-f]{1,6})\}|u(?P<four>[0-9A-Fa-f]{4})|x(?P<two>[0-9A-Fa-f]{2}))|c(?P<control>[A-Za-z])"
    r"|(?P<property>[pP])(?P<name>\{(?:(?P<field>General_Category|gc|Script|sc)=)?(?P<value>[A-Za-z_]+)\})"
    r"|(?P<back>k<[^>]*>|[1-9]\d*|0\d+)|(?P<char>.))",
    re.DOTALL,
)
_PROPERTIES = frozenset(
    (
        *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "Pc", "Pd", "Ps", "Pe"),
        *("Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp", "C", "Cc", "Cf", "Letter", "Mark"),
        *("Uppercase_Letter", "Lowercase_Letter", "Number", "Decimal_Number", "Punctuation", "Symbol", "Separator"),
        *("Space_Separator", "Alphabetic", "Lowercase", "Uppercase", "White_Space", "ASCII", "Any", "Emoji"),
    )
)
_SCRIPTS = frozenset(
    (
        *("Latin", "Greek", "Cyrillic", "Armenian", "Hebrew", "Arabic", "Devanagari", "Bengali", "Tamil", "Thai"),
        *("Hangul", "Hiragana", "Katakana", "Han"),
    )
)
_ASSERTIONS = {"^": "^ in the middle", "$": "$ in the middle", "\\b": "a word boundary", "\\1": "a back-reference"}


@dataclass(frozen=True, slots=True)
class HeldPattern:
    """An expression that matches whole texts. `problem`: the part of the pattern that it omits; empty: none."""

    source: str
    problem: str = ""
    is_invalid: bool = False  # no dialect reads it: `problem` is its mistake


@functools.lru_cache(maxsize=32)  # one schema may have the same pattern in many places
def hold_pattern(pattern: str) -> HeldPattern:
    """The enforceable part of a pattern. An empty `source`: no part is enforceable."""
    try:
        return _Parser(pattern).held()
    except _Unreadable as error:
        return HeldPattern("", str(error), is_invalid=isinstance(error, _Invalid))


class _Unreadable(Exception):
    """The pattern is not a JavaScript regular expression, or cannot be translated at all."""


class _Invalid(_Unreadable):
    """The pattern is not a regular expression of any common dialect."""


@dataclass(slots=True)
class _Term:
    """One piece of a sequence: an atom with its text, a plain group, or an assertion."""

    text: str = ""
    group: list[list[_Term]] | None = None
    assertion: str = ""  # ^, $, (?= and other look-arounds, \b, \1
    repeats: int = 1


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._problem = ""

    def held(self) -> HeldPattern:
        options = _unwrapped(self._options())
        if self._at < len(self._pattern):
            raise _Invalid("a closing parenthesis has no opening one")
        return HeldPattern(f"^(?:{'|'.join(self._edges(option) for option in options)})$", self._problem)

    # Writing

    def _edges(self, option: list[_Term]) -> str:
        """An alternative, with any text around an unanchored match made explicit."""
        before = after = _REST
        while option and option[0].assertion == "^":
            before, option = "", option[1:]
        while option and option[-1].assertion == "$":
            after, option = "", option[:-1]
        return before + self._sequence(option) + after

    def _sequence(self, terms: list[_Term]) -> str:
        return "".join(self._term(term) for term in terms)

    def _term(self, term: _Term) -> str:
        if term.assertion:
            self._problem = self._problem or f"{_ASSERTIONS.get(term.assertion, 'a look-around')} is not supported"
            return _REST if term.assertion == "\\1" else ""
        if term.group is not None:
            return f"(?:{'|'.join(self._sequence(option) for option in term.group)})"
        return term.text

    # Reading

    def _options(self) -> list[list[_Term]]:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _Unreadable(f"groups are nested more than {MAX_NESTING} deep")
        options: list[list[_Term]] = [[]]
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            if self._pattern[self._at] == "|":
                self._at += 1
                options.append([])
            else:
                options[-1].append(self._quantified(self._atom()))
        self._depth -= 1
        return options

    def _quantified(self, term: _Term) -> _Term:
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            return term
        if term.assertion and term.assertion != "\\1":
            raise _Unreadable("an assertion cannot be repeated")
        self._at = found.end()
        if another := _QUANTIFIER.match(self._pattern, self._at):
            # Some dialects have possessive quantifiers, which end with a plus sign.
            raise (_Unreadable if another[1] == "+" else _Invalid)("a quantifier follows another")
        sign, least, comma, most = found.groups()
        low, high = (0, None) if sign else (int(least[:9]), int(most[:9]) if most else None)
        if high is not None and high < low:
            raise _Invalid(f"{found[0]} is not a range")
        suffix = sign or f"{{{low}{comma or ''}{'' if high is None else high}}}"
        repeats = max(1, low, high or 0) * _repeats([[term]])
        if repeats > MAX_REPEATS:
            raise _Unreadable(f"more than {MAX_REPEATS} repetitions")
        return _Term(f"(?:{self._term(term)}){suffix}", repeats=repeats)

    def _atom(self) -> _Term:
        char = self._pattern[self._at]
        match char:
            case "(":
                return self._group()
            case "[":
                return _Term(self._class())
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise _Invalid(f"{char} repeats nothing")
            case "{" if _QUANTIFIER.match(self._pattern, self._at):
                raise _Unreadable("a quantifier repeats nothing")
        self._at += 1
        if char in "^$":
            return _Term(assertion=char)
        return _Term(rf"[^\n\r\x{{2028}}\x{{2029}}{_NUL}]" if char == "." else _char(ord(char)) or _NOTHING)

    def _group(self) -> _Term:
        found = _GROUP.match(self._pattern, self._at)
        assert found is not None
        if found[0] == "(?":
            raise _Unreadable("a group of this kind is not supported")
        self._at = found.end()
        options = self._options()
        if self._at >= len(self._pattern):
            raise _Invalid("a group is not closed")
        self._at += 1
        if found[3]:
            return _Term(assertion=f"(?{found[3]}")
        return _Term(group=options, repeats=_repeats(options))

    def _class(self) -> str:
        found = _CLASS.match(self._pattern, self._at)
        if found is None:
            raise _Invalid("a character class is not closed")
        self._at = found.end()
        body = _class_body(found[2])
        if found[1]:
            return f"[^{body}{_NUL}]" if found[2] else "(?s:.)"
        return f"[{body}]" if body else _NOTHING

    def _escape(self) -> _Term:
        found = _ESCAPE.match(self._pattern, self._at)
        if found is None:
            raise _Invalid("it ends with a backslash")
        self._at = found.end()
        if found["char"] in ("b", "B") or found["back"]:
            return _Term(assertion="\\b" if found["char"] else "\\1")
        code, text = _escaped(found)
        if code is None:
            return _Term(text if text.startswith("[") else f"[{text}]")
        return _Term(text or _NOTHING)


def _class_body(given: str) -> str:
    """The items of a class. In `[\\w-.]` the hyphen is a literal: JavaScript has no ranges next to a class."""
    body = ""
    at = 0
    while at < len(given):
        at, first, text = _class_item(given, at)
        if first is not None and given[at : at + 1] == "-" and at + 1 < len(given):
            end, last, _ = _class_item(given, at + 1)
            if last is not None:
                if first > last:
                    raise _Invalid("a character range is not in order")
                at, text = end, f"{_char(max(first, 1))}-{_char(last)}" if last else ""
        body += text
    return body


def _class_item(given: str, at: int) -> tuple[int, int | None, str]:
    """The position after an item, its code if it is one character, and its text."""
    if given[at] != "\\":
        return at + 1, ord(given[at]), _char(ord(given[at]))
    found = _ESCAPE.match(given, at)
    assert found is not None
    if found["char"] == "B":
        raise _Unreadable("\\B is not a character, so it cannot be in a class")
    if found["char"] == "b":
        return found.end(), 0x08, _char(0x08)
    if found["back"]:
        raise _Unreadable(f"{found[0]} is not supported in a class")
    return found.end(), *_escaped(found)


def _escaped(found: re.Match[str]) -> tuple[int | None, str]:
    """An escape as an item of a class: its code if it is one character, and its text."""
    if found["high"]:
        code = 0x10000 + ((int(found["high"], 16) - 0xD800) << 10) + int(found["low"], 16) - 0xDC00
    elif digits := found["long"] or found["four"] or found["two"]:
        code = int(digits, 16)
    elif found["control"]:
        code = ord(found["control"]) % 32
    elif found["property"]:
        return None, _property(found)
    elif (char := found["char"]).lower() in _CLASSES:
        return None, _CLASSES[char] if char.islower() else f"[^{_CLASSES[char.lower()]}{_NUL}]"
    elif char not in _CONTROLS and char.isalnum():
        raise _Unreadable(f"\\{char} is not followed by a code" if char in "xuc" else f"\\{char} is not supported")
    else:
        code = _CONTROLS.get(char, ord(char))
    return code, _char(code)


def _property(found: re.Match[str]) -> str:
    if found["value"] not in (_SCRIPTS if found["field"] in ("Script", "sc") else _PROPERTIES):
        raise _Unreadable(f"{found[0]:.26} is not a known character property")
    return f"[\\p{found['name']}--{_NUL}]" if found["property"] == "p" else f"[^\\p{found['name']}{_NUL}]"


def _char(code: int) -> str:
    """A character outside or inside of a class. Empty: U+0000, which never matches."""
    if code > _LAST or 0xD800 <= code <= 0xDFFF:
        raise _Unreadable(f"U+{code:04X} is not a character")
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}" if code else ""


def _unwrapped(options: list[list[_Term]]) -> list[list[_Term]]:
    """Replace groups that are a whole alternative by their alternatives, so that anchors are found at the edges."""
    flat: list[list[_Term]] = []
    for option in options:
        group = option[0].group if len(option) == 1 else None
        flat += [option] if group is None else _unwrapped(group)
    return flat


def _repeats(options: list[list[_Term]]) -> int:
    return max((term.repeats for option in options for term in option), default=1)
