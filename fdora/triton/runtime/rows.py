"""Numbers that follow from how many tokens there are, so that one plan serves many.

A plan is written for one number of tokens. Written with `Rows` in the place of that number, all that follows from it by
adding, multiplying and dividing (sizes, grids, strides) knows how it follows, and a comparison limits for how many tokens it
comes out the same. Choices of speed (tiles) are made from plain numbers, ``int(rows)``: they are those of the class of lengths
(`class_of`), whichever length came first, so that the same call always takes the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import ge, gt, le, lt
from typing import Any

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


class Rows(int):
    """times ((each M + more) // by) + plus, where M is the number of tokens of a sequence."""

    tokens: Tokens
    form: tuple[int, int, int, int, int]

    def at(self, M: int) -> int:
        each, more, by, times, plus = self.form
        return times * ((each * M + more) // by) + plus

    def __add__(self, other: int) -> Any:
        each, more, by, times, plus = self.form
        if not isinstance(other, Rows):
            return rows(self.tokens, each, more, by, times, plus + other)
        if other.form[:3] == self.form[:3]:
            return rows(self.tokens, each, more, by, times + other.form[3], plus + other.form[4])
        if by == other.form[2] == 1:
            return rows(self.tokens, each + other.form[0], more + other.form[1])
        raise Fixed(self.form, other.form)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: int) -> Any:
        return self + -other

    def __rsub__(self, other: int) -> Any:
        return -self + other

    def __mul__(self, other: int) -> Any:
        if isinstance(other, Rows):
            raise Fixed(self.form, other.form)
        each, more, by, times, plus = self.form
        return rows(self.tokens, each, more, by, times * other, plus * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Any:
        each, more, by, times, plus = self.form
        if not isinstance(other, Rows) and other > 0:
            if times % other == 0:
                return rows(self.tokens, each, more, by, times // other, plus // other)
            if by == 1:
                return rows(self.tokens, each, more, other)
            if times == 1:
                return rows(self.tokens, each, more + plus * by, by * other)
        raise Fixed(self.form, other)

    def __mod__(self, other: int) -> Any:
        each, more, by, times, plus = self.form
        if times % other == 0 or (by == 1 and each % other == 0):
            return (plus if times % other == 0 else more) % other
        raise Fixed(self.form, other)

    def __and__(self, other: int) -> Any:
        if other & (other + 1):
            raise Fixed(self.form)
        return self % (other + 1)

    def _compared(self, other: Any, how: Callable[[int, int], bool]) -> bool:
        if isinstance(other, Rows):
            return how(self - other, 0)
        if not isinstance(other, int):
            return how(int(self), other)
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
        raise Fixed(self.form)

    __rfloordiv__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __lshift__ = __rshift__ = __or__ = bit_length = _unknown


def rows(tokens: Tokens, each: int = 1, more: int = 0, by: int = 1, times: int = 1, plus: int = 0) -> Any:
    """Of this form; a plain number where it is the same for any number of tokens."""
    if by == 1:
        each, more, times, plus = each * times, more * times + plus, 1, 0
    value = times * ((each * tokens.count + more) // by) + plus
    if each == 0 or times == 0:
        return value
    made = int.__new__(Rows, value)
    made.tokens, made.form = tokens, (each, more, by, times, plus)
    return made
