"""Numbers that follow from how many tokens there are, so that one plan serves many.

A plan is written for one number of tokens. Written with `Rows` in the place of that number, all that follows from it by
adding, multiplying and dividing (sizes, grids, strides) knows how it follows, and a comparison limits for how many tokens it
comes out the same. Choices of speed (tiles) are made from plain numbers, ``int(rows)``: they are those of the class of lengths
(`class_of`), whichever length came first, so that the same call always takes the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import ge, gt, le, lt
from typing import Any, NamedTuple

FEW = 64  # as many plans are no burden, and what runs differs from one to the next
FINE = 1024  # from here on sixteen classes between powers of two, before four: by the model 1.004 of the best time in the mean


def class_of(tokens: int) -> tuple[int, int] | None:
    """The least and the most of those whose tiles are chosen at once; None where each number of tokens has its own."""
    if tokens <= FEW:
        return None
    step = 1 << ((tokens - 1).bit_length() - (5 if tokens > FINE else 3))
    most = -(-tokens // step) * step
    return most - step + 1, most


class Fixed(Exception):
    """Something follows from the number of tokens in a way that `Rows` does not know."""


class Tokens:
    """The rows of one sequence, and from ``least`` to ``most`` of them every comparison comes out as it did."""

    def __init__(self, count: int, least: int, most: int):
        self.count, self.least, self.most = count, least, most

    def narrow(self, holds: Callable[[int], bool]) -> None:
        """``holds`` changes at one number at most on either side."""
        for end in ("least", "most"):
            inside, outside = self.count, getattr(self, end)
            if not holds(outside):
                while abs(outside - inside) > 1:
                    middle = (inside + outside) // 2
                    inside, outside = (middle, outside) if holds(middle) else (inside, middle)
                setattr(self, end, inside)


class Term(NamedTuple):
    each: int
    more: int
    by: int
    times: int


class Rows(int):
    """plus + the sum of times ((each M + more) // by) over ``terms``, where M is the number of tokens of a sequence."""

    tokens: Tokens
    plus: int
    terms: tuple[Term, ...]

    def at(self, M: int) -> int:
        value = self.plus
        for each, more, by, times in self.terms:
            value += times * ((each * M + more) // by)
        return value

    def __add__(self, other: int) -> Any:
        terms = other.terms if isinstance(other, Rows) else ()
        return rows(self.tokens, self.plus + (other.plus if terms else other), *self.terms, *terms)  # type: ignore[attr-defined]

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: int) -> Any:
        return self + -other

    def __rsub__(self, other: int) -> Any:
        return -self + other

    def __mul__(self, other: int) -> Any:
        if isinstance(other, Rows):
            raise Fixed(self.terms, other.terms)
        return rows(self.tokens, self.plus * other, *[term._replace(times=term.times * other) for term in self.terms])

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Any:
        if not isinstance(other, Rows) and other > 0:
            if all([term.times % other == 0 for term in self.terms]):
                divided = [term._replace(times=term.times // other) for term in self.terms]
                return rows(self.tokens, self.plus // other, *divided)
            each, more, by, times = self.terms[0]
            if len(self.terms) == 1 and by == 1:
                return rows(self.tokens, 0, Term(each * times, more * times + self.plus, other, 1))
            if len(self.terms) == 1 and times == 1:
                return rows(self.tokens, 0, Term(each, more + self.plus * by, by * other, 1))
        raise Fixed(self.terms, other)

    def __mod__(self, other: int) -> Any:
        if all([term.times % other == 0 for term in self.terms]):
            return self.plus % other
        raise Fixed(self.terms, other)

    def __and__(self, other: int) -> Any:
        if other & (other + 1):
            raise Fixed(self.terms, other)
        return self % (other + 1)

    def _compared(self, other: Any, how: Callable[[int, int], bool]) -> bool:
        if isinstance(other, Rows):
            return how(self - other, 0)
        if not isinstance(other, int):
            return how(int(self), other)
        if len({term.each * term.times > 0 for term in self.terms}) > 1:  # neither rises nor falls
            raise Fixed(self.terms, other)
        outcome = how(int(self), other)
        self.tokens.narrow(lambda M: how(self.at(M), other) == outcome)
        return outcome

    def __lt__(self, other: Any) -> bool:
        return self._compared(other, lt)

    def __le__(self, other: Any) -> bool:
        return self._compared(other, le)

    def __gt__(self, other: Any) -> bool:
        return self._compared(other, gt)

    def __ge__(self, other: Any) -> bool:
        return self._compared(other, ge)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, int) and self <= other and self >= other

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    __hash__ = int.__hash__

    def _unknown(self, *_: Any) -> Any:
        raise Fixed(self.terms)

    # Of an int they would give plain numbers, true of one length alone. What divides to a float is a choice of speed.
    __rfloordiv__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = __abs__ = bit_length = _unknown
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __or__ = __ror__ = __xor__ = __rxor__ = __rand__ = __invert__ = (
        _unknown
    )


def rows(tokens: Tokens, plus: int = 0, *terms: Term) -> Any:
    """This sum; a plain number where it is the same for any number of tokens."""
    times: dict[tuple[int, int, int], int] = {}
    for each, more, by, count in terms or (Term(1, 0, 1, 1),):
        if by == 1:  # of the form times M + plus
            plus, count, each, more = plus + more * count, each * count, 1, 0
        times[each, more, by] = times.get((each, more, by), 0) + count
    left = tuple([Term(*key, count) for key, count in times.items() if count])
    value = plus + sum([count * ((each * tokens.count + more) // by) for each, more, by, count in left])
    if not left:
        return value
    made = int.__new__(Rows, value)
    made.tokens, made.plus, made.terms = tokens, plus, left
    return made
