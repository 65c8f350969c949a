"""The norms that compiled code keeps of the few layers of one call, brought up to date by one launch.

A replay of a CUDA graph asks in every call whether A, B or s are other ones, and nearly always nothing is. Three launches, one
after the other, say so in 6 to 7 us; this one has all that they do in each of its programs:

1. Each program of a layer hashes its share of A and B, all of the same size: where all of A or all of B is new, as after an
   optimizer's step, all programs see it. It compares that with its word of before, and *arrives*: it adds 1 to a counter, and
   1 << 16 where its word is another. What the counter held tells the last one that it is the last, and whether anybody saw a
   change. Where nobody did, nothing is left to do (a copy of the norms, where one is wanted, is the last one's).
2. A program that saw a change, and the last one if anybody did, take items of the layer (kernels/tree.py) from a second
   counter until there are none. Nobody waits for anybody: whoever saw none and is not the last is gone.
3. Whoever adds the last item of some rows (a counter for each block of them) adds their partial sums up, in the order of the
   columns, whoever wrote them: the same bits in every run, and those of kernels/tree.py.

Counters are 0 between launches: the last one to arrive clears the first, the last of a block clears the block's. The second is
taken in turns out of two: while one is in use, the last one to arrive clears the other, which the launch before has left.
Launches on one state must not overlap: they are on one stream, or wait for each other, as writes to any tensor must.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.tile import zeros
from fdora.triton.kernels.tree import F_C, F_ITEMS, F_K, F_LEAF, F_N, F_PARTIAL, hashed_fields, squares_of_item, word_of
from fdora.triton.runtime.private import gdc_wait

COUNTERS = tl.constexpr(4)  # of a layer: who arrived, whose turn it is of the next two, items taken
ALIGN = tl.constexpr(32)  # what c begins at a multiple of, in numbers: no block of rows is smaller


@triton.jit
def _out(t, L, out0, out1, out2, out3):
    """Where a copy of this layer's norm goes."""
    leaf, out = tl.load(t + F_LEAF * L), out0
    if out1 is not None:
        out = out1 if leaf == 1 else out
    if out2 is not None:
        out = out2 if leaf == 2 else out
    if out3 is not None:
        out = out3 if leaf == 3 else out
    return out


@triton.jit
def _copy(t, L, c, out0, out1, out2, out3, ROOTS: tl.constexpr):
    """The norm of before, where somebody wants a copy."""
    if out0 is not None:
        out, N, before = _out(t, L, out0, out1, out2, out3), tl.load(t + F_N * L).to(tl.int32), c + tl.load(t + F_C * L)
        for n0 in range(0, N, ROOTS):
            n = n0 + tl.arange(0, ROOTS)
            tl.store(out + n, tl.load(before + n, mask=n < N), mask=n < N)


@triton.jit
def kept_kernel(
    table,  # (FIELDS, L) int64
    words,  # (L, parts) int64, by the layer's column
    counters,  # int32: COUNTERS of each layer, then one for each 32 numbers of c
    partial,  # float32, as of kernels/tree.py
    c,  # float32: each layer at its field c
    out0, out1, out2, out3,  # (N,) float32 of each layer, by its field leaf: a copy; None where nobody wants one
    L, first, parts,  # the first column of the table that this launch is for, and words of a layer
    OF: tl.constexpr, HASH: tl.constexpr, ROOTS: tl.constexpr, PDL: tl.constexpr,
):
    layer, part = first + tl.program_id(0) // parts, tl.program_id(0) % parts
    t, mine = table + layer, counters + layer * COUNTERS
    fields = hashed_fields(t, L)
    if PDL:  # the table is of the host
        gdc_wait()

    word, at_word = word_of(fields, part, parts, True, HASH), words + layer * parts + part
    changed, turn = (word != tl.load(at_word)).to(tl.int32), tl.load(mine + 1)
    tl.debug_barrier()  # all threads of the program have read both: from here on they may be others
    arrived = tl.atomic_add(mine, 1 + (changed << 16))
    tl.store(at_word, word)
    if (arrived & 0xFFFF) == parts - 1:  # all others have arrived
        tl.store(mine, 0)
        tl.store(mine + 1, 1 - turn)
        tl.store(mine + 3 - turn, 0)
        changed += arrived >> 16
        if changed == 0:
            _copy(t, L, c, out0, out1, out2, out3, ROOTS)

    if changed > 0:
        items = tl.load(t + F_ITEMS * L).to(tl.int32)
        item = tl.atomic_add(mine + 2 + turn, 1)
        while item < items:
            squares_of_item(t, L, item, partial, None, OF)
            tl.debug_barrier()  # all threads have written theirs
            N, chunks = tl.load(t + F_N * L).to(tl.int32), tl.cdiv(tl.load(t + F_K * L), OF.CHUNK).to(tl.int32)
            block, at_c = item // chunks, tl.load(t + F_C * L)
            arrived_here = counters + L * COUNTERS + at_c // ALIGN + block
            if tl.atomic_add(arrived_here, 1) == chunks - 1:
                tl.store(arrived_here, 0)
                n = block * OF.BLOCK_N + tl.arange(0, OF.BLOCK_N)
                at = partial + tl.load(t + F_PARTIAL * L) + n
                acc = zeros(OF.BLOCK_N)
                for _ in range(0, chunks):
                    acc += tl.load(at, mask=n < N, other=0.0, cache_modifier=".cg")  # others wrote it
                    at += N
                root = tl.sqrt_rn(acc)
                tl.store(c + at_c + n, root, mask=n < N)
                if out0 is not None:
                    tl.store(_out(t, L, out0, out1, out2, out3) + n, root, mask=n < N)
            item = tl.atomic_add(mine + 2 + turn, 1)
