"""Time the tiles of fdora's products on this GPU, and write what fdora chooses by from then on. Never needed: fdora has a
choice for every GPU, by numbers of an H200.

The file is ~/.cache/fdora/tiles.json, below XDG_CACHE_HOME where that is set, or what FDORA_TILES names (0: none). Processes
that start later read it, on this kind of GPU with these versions of torch, Triton and fdora. For a direction and a number of
tokens the choice changes only where products are faster by it, whose own times it has not seen: by 3 % or more in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter
from typing import Any, NamedTuple

import torch

from fdora import _tuned
from fdora._check import FdoraError, fail
from fdora._command import WRITTEN, mistakes, parser_of, progress, using
from fdora.functional import select_backend

Shape = tuple[int, int, int, int]  # M, K, N, r
# K, N of layers; of each class of tokens the numbers, and the ranks
SIDES = ((4096, 4096), (4096, 14336), (14336, 4096), (2048, 8192), (8192, 2048), (5120, 5120), (2560, 9728), (4096, 1024))
TOKENS = ((128, 256, 384, 512), (768, 1024, 1536, 2048), (3072, 4096, 6144, 8192))
RANKS = (16, 32, 64, 128)
ROUNDS = 16  # of all classes in both directions
LEAST = 4  # shapes of a class


class Row(NamedTuple):
    """One product. ``ways``: those of triton.tiles.product, with the model's times."""

    of: str
    ways: list[Any]
    us: dict[str, float]  # measured, by the names of the ways


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("tune", __doc__)
    parser.add_argument("--minutes", type=float, default=10, help="what it may take; most GPUs need less (%(default)s)")
    parser.add_argument("--out", type=Path, help="another file")
    options = parser.parse_args(argv)
    with mistakes(parser):
        out = options.out or _tuned.place()
        if out is None:
            raise fail("tune", "--out", "a file where FDORA_TILES names none", "nothing", "Name one.")
        return tune(60 * options.minutes, out)


def tune(seconds: float, out: Path) -> int:
    begun, on_gpu = perf_counter(), torch.cuda.is_available() and not torch.version.hip
    if not on_gpu or select_backend("cuda", torch.bfloat16).name != "triton":
        raise FdoraError("fdora.tune: it wants an NVIDIA GPU on which fdora's kernels run; fdora doctor says what runs here.")
    _tuned.load(out)  # a broken file is told of before the work
    from fdora.triton import search

    cases = [(shape, forward) for shape in shapes() for forward in (True, False)]
    with suppress(Exception):  # what does not compile is left out later
        search.compile_ahead(cases)
    timer = search.on_gpu()

    def one(shape: Shape, forward: bool) -> Row:
        ways = search.candidates(shape, forward)
        us = search.timed(search.operands(shape, forward, "cuda"), forward, ways, timer)
        return Row(_tuned.class_of(forward, shape[0]), ways, us)

    rows = [row for row in within(seconds - (perf_counter() - begun), cases, one) if row.us]
    if not rows:
        raise fail("tune", "--minutes", "long enough to time a product", seconds / 60, "Give more; if it is, run fdora doctor.")
    taken = adopted(rows)
    at = torch.cuda.current_device()
    entry = {"name": torch.cuda.get_device_name(at), "made_with": _tuned.made_with(), "factors": taken}
    with using("tune", "--out", WRITTEN):
        _tuned.save(out, _tuned.key_at(at), entry)
    print(f"{out}: {len(taken)} changed, after {perf_counter() - begun:.0f} s")
    if out != _tuned.place():
        print(f"fdora reads it where FDORA_TILES={out} is set")
    return 0


def shapes() -> list[Shape]:
    """All classes take turns, so that a search may end at any time."""
    return [
        (tokens[(i + i // len(SIDES)) % len(tokens)], *SIDES[i % len(SIDES)], RANKS[i // 2 % len(RANKS)])
        for i in range(ROUNDS)
        for tokens in TOKENS
    ]


def within(
    seconds: float,
    cases: Iterable[tuple[Shape, bool]],
    one: Callable[[Shape, bool], Row],
    clock: Callable[[], float] = perf_counter,
) -> list[Row]:
    """Of so many cases as fit into the time. What finds no memory is left out."""
    rows, begun, longest = [], clock(), 0.0
    for case in progress(cases, "products"):
        at = clock()
        if at - begun + longest > seconds:
            break
        try:
            rows.append(one(*case))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
        longest = max(longest, clock() - at)
    return rows


def adopted(rows: list[Row]) -> dict[str, dict[str, float]]:
    """The factors of each class that is worth it, which lines on stdout say."""
    from fdora.triton.tiles.product import NOISE

    found = {}
    for of in dict.fromkeys(row.of for row in rows):
        some = [row for row in rows if row.of == of]
        gains = gains_of(some)
        mean = geometric_mean(gains or [1.0])
        if worth := len(some) >= LEAST and len(gains) > 1 and mean >= NOISE:
            found[of] = factors_of(some)
        left = "" if worth else ": left as it is"
        print(f"{of:<26} {len(some):3} shapes; the choice of {len(gains)} changes, before / after {mean:.3f}{left}")
    return found


def gains_of(rows: list[Row]) -> list[float]:
    """Of the products whose choice changes by factors that the others gave: the time before over the time after."""
    from fdora.triton.tiles.product import best

    gains = []
    for row in rows:
        factors = factors_of([other for other in rows if other is not row])
        usual, way = best(row.ways, {}), best(row.ways, {name: f for name, f in factors.items() if name in row.us})
        if way.tuned:
            gains.append(row.us[usual.name] / row.us[way.name])
    return gains


def factors_of(rows: list[Row]) -> dict[str, float]:
    """Time taken over time modelled, in the geometric mean, of the ways that every shape could take."""
    ratios = [{way.name: row.us[way.name] / way.us for way in row.ways if way.name in row.us} for row in rows]
    names = set(ratios[0]).intersection(*ratios[1:]) if ratios else set()
    return {name: round(geometric_mean(each[name] for each in ratios), 4) for name in sorted(names)}
