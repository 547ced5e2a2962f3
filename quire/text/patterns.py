"""Translates JSON Schema's `pattern` (JavaScript regular expressions) to the grammar compiler's dialect. Pure.

The dialects differ in the meaning of `.`, `\\s`, `[a&&b]` and `$`, so a pattern is parsed and rewritten. An assertion
without a counterpart (look-around, `\\b`, back-reference) is omitted: the result allows more, never less, and
`HeldPattern.problem` names the omission.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

MAX_REPEATS = 10_000  # of one atom, multiplied over nested groups: the compiler unrolls them
MAX_NESTING = 64  # of groups
MAX_START = 64  # leading characters that are compared to find out whether two patterns are disjoint

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included

_LAST = 0x10FFFF
_ANY = "(?s:.)"
_REST = "(?s:.*)"
_NUL = r"\x{0}"
_NOTHING = r"[^\x{0}-\x{10FFFF}]"
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d+)(,?)(\d*)\})\??")
_GROUP = re.compile(r"\?(?:(:)|(=|!|<=|<!)|P?<([A-Za-z_$][\w$]*)>)")
_PROPERTY = re.compile(r"\{(?:(General_Category|gc|Script|sc)=)?([A-Za-z_]+)\}")
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


@dataclass(frozen=True, slots=True)
class HeldPattern:
    """Regular expressions that must all match. `problem`: the part of the pattern they omit; empty: none."""

    sources: tuple[str, ...]
    problem: str = ""
    is_invalid: bool = False  # no dialect reads it: `problem` is its mistake
    start: tuple[Ranges, ...] = ()  # possible first characters of a match, as far as they are known


@functools.lru_cache(maxsize=32)  # one schema may have the same pattern in many places
def hold_pattern(pattern: str) -> HeldPattern:
    """The enforceable part of a pattern. Empty `sources`: no part is enforceable."""
    try:
        return _Parser(pattern).held()
    except _Unreadable as error:
        return HeldPattern((), str(error), is_invalid=isinstance(error, _Invalid))


def start_apart(one: HeldPattern, other: HeldPattern) -> bool:
    """Whether the first characters show that no text matches both patterns."""
    return any(not _overlap(a, b) for a, b in zip(one.start, other.start, strict=False))


def any_text_but(texts: list[str]) -> str:
    """A pattern that matches every text except these. `hold_pattern` enforces it fully."""
    trie: dict[str, dict[str, object]] = {}
    for text in texts:
        node: dict[str, object] = trie  # type: ignore[assignment]
        for char in text:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = {}
    return f"^(?:{_but(trie)})$"


def _but(node: object) -> str:
    """The alternatives that may follow a common prefix of some of the texts."""
    assert isinstance(node, dict)
    chars = [char for char in node if char]
    others = "[^" + "".join(f"\\u{{{ord(char):X}}}" for char in chars) + "]" if chars else "[^]"
    options = [f"{others}[^]*", *(f"\\u{{{ord(char):X}}}(?:{_but(node[char])})" for char in chars)]
    return "|".join(options if "" in node else [*options, ""])


class _Unreadable(Exception):
    """The pattern is not a JavaScript regular expression, or cannot be translated at all."""


class _Invalid(_Unreadable):
    """The pattern is not a regular expression of any common dialect."""


@dataclass(slots=True)
class _Term:
    """One piece of a sequence: an atom with its text, a plain group, or an assertion."""

    text: str = ""
    group: list[list[_Term]] | None = None
    assertion: str = ""  # ^, $, (?= and other look-arounds, \b
    ranges: Ranges | None = None  # the characters of an atom that matches exactly one
    repeats: int = 1
    look: list[list[_Term]] = field(default_factory=list)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._problem = ""

    def held(self) -> HeldPattern:
        options = self._options()
        if self._at < len(self._pattern):
            raise _Invalid("a closing parenthesis has no opening one")
        extra: list[str] = []
        options = _unwrapped(options)
        if len(options) == 1:
            options, extra = self._take_looks(options[0])
        source = self._whole(options)
        starts = [_start(option) for option in options]
        return HeldPattern((source, *extra), self._problem, start=starts[0] if len(starts) == 1 else ())

    # Writing

    def _take_looks(self, option: list[_Term]) -> tuple[list[list[_Term]], list[str]]:
        """Split off look-aheads directly after `^`: they become separate expressions that must match as well."""
        size = 1
        extra: list[str] = []
        if option and option[0].assertion == "^":
            while size < len(option) and option[size].assertion == "(?=":
                anchored = [[_Term(assertion="^"), *look] for look in option[size].look]
                extra.append(self._whole(anchored))
                size += 1
        return [option[:1] + option[size:]], extra

    def _whole(self, options: list[list[_Term]]) -> str:
        """An expression that matches whole texts: any text around an unanchored match is made explicit."""
        return f"^(?:{'|'.join(self._edges(option) for option in options)})$"

    def _edges(self, option: list[_Term]) -> str:
        begins = ends = False
        while option and option[0].assertion == "^":
            begins, option = True, option[1:]
        while option and option[-1].assertion == "$":
            ends, option = True, option[:-1]
        return ("" if begins else _REST) + self._sequence(option) + ("" if ends else _REST)

    def _sequence(self, terms: list[_Term]) -> str:
        return "".join(self._term(term) for term in terms)

    def _term(self, term: _Term) -> str:
        if term.assertion:
            names = {"^": "^ in the middle", "$": "$ in the middle", "\\b": "a word boundary"}
            self._leave_out(names.get(term.assertion, "a look-around"))
            return ""
        if term.group is not None:
            return f"(?:{'|'.join(self._sequence(option) for option in term.group)})"
        return term.text

    def _leave_out(self, what: str) -> None:
        self._problem = self._problem or f"{what} is not supported"

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
        if term.assertion:
            raise _Unreadable("an assertion cannot be repeated")
        self._at = found.end()
        if another := _QUANTIFIER.match(self._pattern, self._at):
            # Some dialects have possessive quantifiers, which end with a plus sign.
            raise (_Unreadable if another[1] == "+" else _Invalid)("a quantifier follows another")
        sign, least, comma, most = found.groups()
        if sign:
            suffix, repeats = sign, 1
        else:
            low, high = int(least[:9]), int(most[:9]) if most else None
            if high is not None and high < low:
                raise _Invalid(f"{found[0]} is not a range")
            suffix = f"{{{low}{comma}{'' if high is None else high}}}"
            repeats = max(1, low, high or 0)
        repeats *= max(1, _repeats([[term]]))
        if repeats > MAX_REPEATS:
            raise _Unreadable(f"more than {MAX_REPEATS} repetitions")
        is_exact = suffix in ("{1}", "{1,1}")
        return _Term(f"(?:{self._term(term)}){suffix}", repeats=repeats, ranges=term.ranges if is_exact else None)

    def _atom(self) -> _Term:
        char = self._pattern[self._at]
        self._at += 1
        match char:
            case "^" | "$":
                return _Term(assertion=char)
            case "(":
                return self._group()
            case ".":
                return _of_ranges(_complement(_LINE_ENDS))
            case "[":
                return self._class()
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise _Invalid(f"{char} repeats nothing")
            case "{" if _QUANTIFIER.match(self._pattern, self._at - 1):
                raise _Unreadable("a quantifier repeats nothing")
        return _one(ord(char))

    def _group(self) -> _Term:
        assertion = ""
        if self._pattern.startswith("?", self._at):
            found = _GROUP.match(self._pattern, self._at)
            if found is None:
                raise _Unreadable("a group of this kind is not supported")
            assertion = f"(?{found[2]}" if found[2] else ""
            self._at = found.end()
        options = self._options()
        if self._at >= len(self._pattern):
            raise _Invalid("a group is not closed")
        self._at += 1
        if assertion:
            return _Term(assertion=assertion, look=options)
        return _Term(group=options, repeats=_repeats(options))

    def _class(self) -> _Term:
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        parts: list[str] = []
        ranges: list[tuple[int, int]] = []
        is_plain = True
        while not self._pattern.startswith("]", self._at):
            item = self._class_item()
            if item.ranges is None:
                is_plain = False
                parts.append(item.text)
            elif self._is_range(item):
                self._at += 1
                ranges.append(_range(item, self._class_item()))
            else:
                ranges += item.ranges
        self._at += 1
        known = _sorted(ranges)
        if is_plain:
            return _of_ranges(_complement(known) if is_negated else known)
        # The class may lack quotes, so it excludes U+0000: see _held_ranges.
        body = _inside(known) + "".join(parts)
        return _Term(f"[^{_NUL}{body}]" if is_negated else f"[[{body}]--{_NUL}]")

    def _is_range(self, first: _Term) -> bool:
        """Whether a range follows. In `[\\w-.]` the hyphen is a literal: JavaScript has no ranges next to a class."""
        rest = self._pattern[self._at : self._at + 3]
        is_class = rest[1:2] == "\\" and rest[2:3] in "dDwWsSpP"
        return rest.startswith("-") and rest[1:2] not in ("]", "") and not is_class and _single(first)

    def _class_item(self) -> _Term:
        if self._at >= len(self._pattern):
            raise _Invalid("a character class is not closed")
        char = self._pattern[self._at]
        self._at += 1
        return _one(ord(char)) if char != "\\" else self._escape(in_class=True)

    def _escape(self, *, in_class: bool = False) -> _Term:
        if self._at >= len(self._pattern):
            raise _Invalid("it ends with a backslash")
        char = self._pattern[self._at]
        self._at += 1
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return _of_ranges(ranges if char.islower() else _complement(ranges))
        if char in _CONTROLS:
            return _one(_CONTROLS[char])
        if char == "B" and in_class:
            raise _Unreadable("\\B is not a character, so it cannot be in a class")
        if char in "bB":
            return _one(0x08) if in_class and char == "b" else _Term(assertion="\\b")
        if char == "0" and not self._pattern[self._at : self._at + 1].isdigit():
            return _one(0)
        if (char.isdigit() or char == "k") and not in_class:
            return self._back_reference(char)
        if char in "pP":
            return self._property(char)
        if char in "xuc":
            return _one(self._code(char))
        if char.isalnum():
            raise _Unreadable(f"\\{char} is not supported")
        return _one(ord(char))

    def _back_reference(self, char: str) -> _Term:
        rest = r"<[^>]*>" if char == "k" else r"\d*"
        found = re.compile(rest).match(self._pattern, self._at)
        if found is None:
            raise _Unreadable(f"\\{char} is not supported")
        self._at = found.end()
        self._leave_out("a back-reference")
        return _Term(_REST)

    def _property(self, char: str) -> _Term:
        found = _PROPERTY.match(self._pattern, self._at)
        if found is None or found[2] not in (_SCRIPTS if found[1] in ("Script", "sc") else _PROPERTIES):
            raise _Unreadable(f"\\{char}{self._pattern[self._at : self._at + 24]} is not a known character property")
        self._at = found.end()
        return _Term(f"\\p{found[0]}" if char == "p" else f"[^{_NUL}\\p{found[0]}]")

    def _code(self, char: str) -> int:
        forms = {"x": r"([0-9A-Fa-f]{2})", "u": r"(?:\{([0-9A-Fa-f]{1,6})\}|([0-9A-Fa-f]{4}))", "c": r"([A-Za-z])"}
        found = re.compile(forms[char]).match(self._pattern, self._at)
        if found is None:
            raise _Unreadable(f"\\{char} is not followed by a code")
        self._at = found.end()
        if char == "c":
            return ord(found[1]) % 32
        code = int(next(part for part in found.groups() if part), 16)
        if 0xD800 <= code < 0xDC00:
            low = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})").match(self._pattern, self._at)
            if low is not None:
                self._at = low.end()
                return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return code


def _unwrapped(options: list[list[_Term]]) -> list[list[_Term]]:
    """Replace groups that are a whole alternative by their alternatives, so that anchors are found at the edges."""
    flat: list[list[_Term]] = []
    for option in options:
        group = option[0].group if len(option) == 1 else None
        flat += [option] if group is None else _unwrapped(group)
    return flat


def _start(option: list[_Term]) -> tuple[Ranges, ...]:
    if not option or option[0].assertion != "^":
        return ()
    found: list[Ranges] = []
    for term in option[1 : 1 + MAX_START]:
        if term.ranges is None:
            break
        found.append(term.ranges)
    return tuple(found)


def _repeats(options: list[list[_Term]]) -> int:
    return max((term.repeats for option in options for term in option), default=1)


@functools.lru_cache(maxsize=1024)
def _one(code: int) -> _Term:
    if code > _LAST or 0xD800 <= code <= 0xDFFF:
        raise _Unreadable(f"U+{code:04X} is not a character")
    return _of_ranges(((code, code),))


def _single(term: _Term) -> bool:
    return term.ranges is not None and len(term.ranges) == 1 and term.ranges[0][0] == term.ranges[0][1]


def _range(first: _Term, last: _Term) -> tuple[int, int]:
    if not first.ranges or not last.ranges:
        raise _Unreadable("a character range lacks its first or last character")
    low, high = first.ranges[0][0], last.ranges[0][0]
    if low > high:
        raise _Invalid("a character range is not in order")
    return low, high


def _of_ranges(ranges: Ranges) -> _Term:
    if ranges == ((0, _LAST),):
        return _Term(_ANY, ranges=ranges)
    held = _held_ranges(ranges)
    if len(held) == 1 and held[0][0] == held[0][1]:
        return _Term(_char(held[0][0]), ranges=ranges)
    return _Term(f"[{_inside(held)}]" if held else _NOTHING, ranges=ranges)


def _held_ranges(ranges: Ranges) -> Ranges:
    """The ranges, without U+0000 if the class lacks quotes or backslashes.

    llguidance 1.9 treats a class with all 32 control characters as one with every escaped character, so `[^"]` would
    allow a quote. The compiler merges the classes of one alternative, so U+0000 is removed from each of them.
    """
    has_quotes = all(any(low <= code <= high for low, high in ranges) for code in (0x22, 0x5C))
    if has_quotes or not ranges or ranges[0][0] > 0:
        return ranges
    high = ranges[0][1]
    return ((1, high), *ranges[1:]) if high else ranges[1:]


def _inside(ranges: Ranges) -> str:
    return "".join(_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in ranges)


def _char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}"


def _sorted(ranges: list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    begin = 0
    for low, high in ranges:
        if low > begin:
            found.append((begin, low - 1))
        begin = high + 1
    return tuple([*found, (begin, _LAST)] if begin <= _LAST else found)


def _overlap(one: Ranges, other: Ranges) -> bool:
    """Whether sorted ranges share a code point. Visits every range once."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][0] <= other[j][1] and other[j][0] <= one[i][1]:
            return True
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return False
