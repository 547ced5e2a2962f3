"""How answers in JSON come to an end: small models fall into ruts, and a grammar lets them go on for ever.

A schema without bounds allows a number of a thousand digits, and a string that says the same word until the tokens are
used up. Here the masks of a matcher are narrowed where that has begun, and only to what it allows: every answer still
matches its schema. Knows tokens and masks; knows nothing of whoever makes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from quire.engine.masking import Matcher

MAX_DIGITS = 30  # in a row; a double keeps 17
MAX_EXPONENT_DIGITS = 2  # with so few no number is infinite, whatever its other digits
# What counts as a rut: the last bytes are one piece over and over, of at most so many bytes.
RUTS = ((128, 8), (256, 64))
TAIL = 16  # bytes by which the piece is found

_QUOTE, _BACKSLASH, _DIGITS = ord('"'), ord("\\"), frozenset(b"0123456789")
_LEAP = re.compile(rb".+,|.*[\[{].", re.DOTALL)  # over a place at which an array or object could be closed
_LONG_EXPONENT = re.compile(rb"[0-9.]*[eE][+-]?[0-9]{%d,}" % (MAX_EXPONENT_DIGITS + 1))


class JsonTokens:
    """Which tokens do what, as numbers whose bits are those of a mask."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._ids = {token: token_id for token_id, token in enumerate(tokens) if token}
        self._longest = min(max(map(len, tokens)), RUTS[-1][1])
        self._breaks = [token_id for token_id, token in enumerate(tokens) if token == b"\n"]
        self.digits = self._find(lambda token: token[:1].isdigit())
        self.quotes = self._find(lambda token: token.startswith(b'"'))
        self.brackets = self._find(lambda token: bool(token) and not token.strip(b"]}"))  # no more: `},` would go on
        self.leaps = self._find(lambda token: _LEAP.match(token) is not None)
        self.long_exponents = self._find(lambda token: _LONG_EXPONENT.match(token) is not None)
        runs = [re.compile(rb"[+-]?[0-9]{%d}" % (count + 1)) for count in range(MAX_EXPONENT_DIGITS + 1)]
        self.longer_runs = [self._find(lambda token, run=run: run.match(token) is not None) for run in runs]  # type: ignore[misc]

    def may_break(self, mask: bytes) -> bool:
        """Whether a line may end here. With a vocabulary that has no line breaks nobody can tell."""
        return not self._breaks or any(mask[token_id >> 3] >> (token_id & 7) & 1 for token_id in self._breaks)

    def prefixes(self, piece: bytes) -> int:
        """The tokens that begin a piece which comes over and over."""
        endless = piece * (-(-self._longest // len(piece)))
        found = (self._ids.get(endless[:length]) for length in range(1, self._longest + 1))
        return sum(1 << token_id for token_id in found if token_id is not None)

    def _find(self, is_wanted: Callable[[bytes], bool]) -> int:
        bits = bytearray(-(-len(self.tokens) // 8))
        for token_id, token in enumerate(self.tokens):
            if is_wanted(token):
                bits[token_id // 8] |= 1 << token_id % 8
        return int.from_bytes(bits, "little")


class EndingJson:
    """A matcher of JSON whose answers end.

    A number has at most `MAX_DIGITS` in a row where it may end, and is finite. An answer that has run into a rut
    (`RUTS`) may only close what goes on and on: the string it is in, or the array or object around it. Where the schema
    has not let it for a whole turn, it may not go on word for word; and where nothing else is left, it goes on.
    """

    __slots__ = (
        *("_exponent", "_is_escaped", "_is_string", "_matcher", "_num_digits", "_num_in_string", "_recent"),
        "_tokens",
    )

    def __init__(self, matcher: Matcher, tokens: JsonTokens) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._begin()

    def _begin(self) -> None:
        self._is_string = self._is_escaped = False
        self._num_in_string = 0  # bytes of it
        self._num_digits = 0  # in a row, up to now
        self._exponent: int | None = None  # how many digits it has, while we are in one
        self._recent = bytearray()

    @property
    def family(self) -> object:
        return self._matcher.family

    def mask(self) -> bytes:
        return self._narrowed(self._matcher.mask())

    def _narrowed(self, mask: bytes) -> bytes:
        endless = 0 if self._is_string else self._endless_numbers()
        piece = b"" if self._is_escaped else self._rut()
        if not endless and not piece:
            return mask
        allowed = int.from_bytes(mask, "little")
        kept = allowed & ~endless or allowed
        return (self._out_of(piece, kept) if piece else kept).to_bytes(len(mask), "little")

    def _out_of(self, piece: bytes, allowed: int) -> int:
        """Of the tokens that are allowed, those that lead out of a rut."""
        tokens = self._tokens
        is_around = self._is_string and self._num_in_string < len(piece)  # around this string: its end is to come
        closing = 0 if is_around else allowed & (tokens.quotes if self._is_string else tokens.brackets)
        if closing:
            return closing
        kept = allowed & ~tokens.leaps or allowed
        return kept if is_around or not self._has_turned(piece) else kept & ~tokens.prefixes(piece) or kept

    def consume(self, token: int) -> bool:
        data = self._tokens.tokens[token]
        self._recent += data
        del self._recent[: -sum(RUTS[-1])]
        for byte in data:
            if self._is_string:
                self._num_in_string += 1
                is_end = byte == _QUOTE and not self._is_escaped
                self._is_escaped = byte == _BACKSLASH and not self._is_escaped
                self._is_string = not is_end
            else:
                self._read_number(byte)
                self._is_string, self._num_in_string = byte == _QUOTE, 0
        return self._matcher.consume(token)

    def _read_number(self, byte: int) -> None:
        if byte in _DIGITS:
            self._num_digits += 1
            if self._exponent is not None:
                self._exponent += 1
        elif byte in b"eE" and self._num_digits:
            self._num_digits, self._exponent = 0, 0
        elif not (byte in b"+-" and self._exponent == 0):
            self._num_digits, self._exponent = 0, None

    def _endless_numbers(self) -> int:
        """The tokens that would make a number too long here."""
        tokens = self._tokens
        forbidden = tokens.long_exponents
        if self._exponent is not None:
            forbidden |= tokens.longer_runs[max(MAX_EXPONENT_DIGITS - self._exponent, 0)]
        return forbidden | tokens.digits if self._num_digits >= MAX_DIGITS else forbidden

    def _rut(self) -> bytes:
        """The piece that comes over and over, and is to come again; nothing, if none does."""
        recent = self._recent
        if len(recent) < RUTS[0][0]:
            return b""
        at = recent.rfind(recent[-TAIL:], 0, -1)
        period = len(recent) - TAIL - at
        for length, longest in RUTS if at >= 0 else ():
            is_long = period <= longest and len(recent) >= length
            if is_long and recent[-length + period :] == recent[-length:-period]:
                return bytes(recent[-period:])
        return b""

    def _has_turned(self, piece: bytes) -> bool:
        """Whether the piece came once more since the rut was one."""
        period = len(piece)
        length = next(length for length, longest in RUTS if period <= longest) + period
        recent = self._recent[-length:]
        return len(recent) == length and recent[period:] == recent[:-period]


class EndingJsonInText(EndingJson):
    """The same where JSON stands in text, as a call of a tool does behind words and thoughts.

    JSON as we have it written has no line breaks, and free text may have one at any place. So where a line may end this
    is no JSON: nothing is narrowed, and what comes next is read as if it were the beginning. A mask is asked for before
    each token, so no text is taken for JSON.
    """

    __slots__ = ()

    def mask(self) -> bytes:
        mask = self._matcher.mask()
        if not self._tokens.may_break(mask):
            return self._narrowed(mask)
        self._begin()
        return mask
