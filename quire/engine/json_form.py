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
        self.ats = self._find(lambda token: token.startswith(b"@"))
        self.spaces = self._find(lambda token: token.startswith(b" "))
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
    (`RUTS`) may only close what goes on and on: the string it is in, or the array or object around it, or all of them
    where each holds the next; the name in an e-mail address ends with its @. Where the schema has not let it for a
    whole turn, it may not go on word for word; and where nothing else is left, it goes on.
    """

    __slots__ = (
        *("_depth", "_exponent", "_is_escaped", "_is_string", "_matcher", "_num_digits", "_num_in_string", "_recent"),
        *("_tokens", "_wanted_depth"),
    )

    def __init__(self, matcher: Matcher, tokens: JsonTokens) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._begin()

    def _begin(self) -> None:
        self._is_string = self._is_escaped = False
        self._num_in_string = 0  # bytes of it
        self._depth = 0  # of arrays and objects
        self._wanted_depth: int | None = None  # that to which all is to be closed
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
        if not endless and not piece and self._wanted_depth is None:
            return mask
        allowed = int.from_bytes(mask, "little")
        kept = allowed & ~endless or allowed
        if piece and self._is_string and self._num_in_string >= len(piece):
            kept = kept & self._tokens.quotes or self._at_last(kept) or self._other(piece, kept)
        elif piece or self._wanted_depth is not None:
            kept = self._closing(piece, kept)
        return kept.to_bytes(len(mask), "little")

    def _at_last(self, allowed: int) -> int:
        """The tokens that lead out of the name in an e-mail address, which may hold all but a space: none elsewhere."""
        return 0 if allowed & self._tokens.spaces else allowed & self._tokens.ats

    def _closing(self, piece: bytes, allowed: int) -> int:
        """The tokens that close an array or object, or lead to a place where that is possible."""
        tokens = self._tokens
        if not self._is_string and (closing := allowed & tokens.brackets):
            opened = sum(map(piece.count, (b"[", b"{"))) - sum(map(piece.count, (b"]", b"}")))
            if opened > 0:  # each holds the next
                self._wanted_depth = self._depth - opened * (_rut_bytes(piece) // len(piece))
            return closing
        kept = allowed & ~tokens.leaps or allowed
        return self._other(piece, kept) if piece and not self._is_string else kept

    def _other(self, piece: bytes, allowed: int) -> int:
        """The tokens that do not go on word for word, once the piece came another time since the rut was one."""
        length, period = _rut_bytes(piece) + len(piece), len(piece)
        recent = self._recent[-length:]
        has_turned = len(recent) == length and recent[period:] == recent[:-period]
        return allowed & ~self._tokens.prefixes(piece) or allowed if has_turned else allowed

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
                self._depth += (byte in b"[{") - (byte in b"]}")
                self._is_string, self._num_in_string = byte == _QUOTE, 0
        if self._wanted_depth is not None and self._depth <= self._wanted_depth:
            self._wanted_depth = None
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


def _rut_bytes(piece: bytes) -> int:
    return next(length for length, longest in RUTS if len(piece) <= longest)


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
