"""PTX that looks 4-bit codes up in registers, for kernels/decode.py and kernels/small_quant.py."""

from __future__ import annotations

import struct

from fdora.quant import TABLES


def _block(lines: list[str]) -> str:
    return "{\n" + "\n".join(lines) + "\n}"


def _words(rows: list[bytes], plane: int) -> list[str]:
    """One byte of each of 16 entries, four to a word."""
    return ["0x" + bytes(row[plane] for row in rows[i : i + 4])[::-1].hex() for i in (0, 4, 8, 12)]


def _shuffles(codes: str, held: str) -> list[str]:
    """What the nibbles of these codes stand for, from the lanes that hold it: $0 to $3 the low ones, $4 to $7 the high ones."""
    lines = []
    for i in range(8):
        lines += [f"shr.b32 code, {codes}, {4 * i};"] * (i > 0)
        source = codes if i == 0 else "code"
        lines.append(f"shfl.sync.idx.b32 ${i // 2 + 4 * (i % 2)}, {held}, {source}, 0x100f, 0xffffffff;")
    return lines


def lookup(table: tuple[float, ...]) -> str:
    """PTX: eight nibbles of $8 as float32. $0 to $3 are the low nibbles of its four bytes, $4 to $7 the high ones.

    PRMT d, a, b, sel takes byte i of d from the eight bytes of b:a as nibble i of sel says, whose highest bit must be 0.
    """
    rows = [struct.pack("<f", v) for v in table]  # a plane is one byte of each: 0 the lowest of the mantissa, 3 the sign
    planes = (2, 3) if all(row[:2] == bytes(2) for row in rows) else (0, 1, 2, 3)
    lines = [
        ".reg .b32 code, pick, codes, picks, neg, pos, p<4>, lo, hi;",
        "and.b32 code, $8, 0x77777777;",
        "shr.b32 pick, $8, 1;",  # nibble i: byte i of pos:neg, or 4 + i where the high bit of the code is set
        "lop3.b32 pick, pick, 0x44444444, 0x32103210, 0xEA;",
    ]
    for half in (0, 1):  # the lower two bytes of $8, the upper two
        lines += [f"shr.b32 codes, code, {16 * half};", f"shr.b32 picks, pick, {16 * half};"]
        for p in planes:
            words = _words(rows, p)
            lines += [
                f"prmt.b32 neg, {words[0]}, {words[1]}, codes;",
                f"prmt.b32 pos, {words[2]}, {words[3]}, codes;",
                f"prmt.b32 p{p}, neg, pos, picks;",
            ]
        for byte, two in ((2 * half, "0x5140"), (2 * half + 1, "0x7362")):  # its low nibble beside its high one
            lines.append(f"prmt.b32 hi, p2, p3, {two};")
            if planes == (2, 3):
                lines += [f"shl.b32 ${byte}, hi, 16;", f"and.b32 ${4 + byte}, hi, 0xffff0000;"]
            else:
                lines.append(f"prmt.b32 lo, p0, p1, {two};")
                lines += [f"prmt.b32 ${byte}, lo, hi, 0x5410;", f"prmt.b32 ${4 + byte}, lo, hi, 0x7632;"]
    return _block(lines)


PTX = {name: lookup(table) for name, table in TABLES.items()}


def lane_value(table: tuple[float, ...]) -> str:
    """PTX: the bits of the entry whose number is that of the lane, modulo 16."""
    rows = [struct.pack("<f", v) for v in table]
    lines = [
        ".reg .b32 lane, code, p<4>, lo, hi, first, second;",
        ".reg .pred upper;",
        "mov.u32 lane, %laneid;",
        "and.b32 code, lane, 7;",
        "and.b32 lane, lane, 8;",
        "setp.ne.u32 upper, lane, 0;",
    ]
    for p in range(4):
        words = _words(rows, p)
        lines += [
            f"selp.b32 first, {words[2]}, {words[0]}, upper;",
            f"selp.b32 second, {words[3]}, {words[1]}, upper;",
            f"prmt.b32 p{p}, first, second, code;",
        ]
    lines += ["prmt.b32 lo, p0, p1, 0x5140;", "prmt.b32 hi, p2, p3, 0x5140;", "prmt.b32 $0, lo, hi, 0x5410;"]
    return _block(lines)


def shuffled() -> str:
    """PTX: what ``lookup`` gives, where $9 holds what ``lane_value`` does. A shuffle reads the lower four bits of its index:
    a lane takes the entry from that lane of its half of the warp."""
    return _block([".reg .b32 code;", *_shuffles("$8", "$9")])


def of_words() -> str:
    """PTX: what the nibbles of one byte of each of four words $8 to $11 stand for: $0 to $3 the low ones, $4 to $7 the high
    ones. $12 names the byte b, as b + 16 (4 + b), and $16 holds what ``lane_value`` does."""
    lines = [
        ".reg .b32 two, four, code;",
        "prmt.b32 two, $8, $9, $12;",
        "prmt.b32 four, $10, $11, $12;",
        "prmt.b32 four, two, four, 0x5410;",
    ]
    return _block([*lines, *_shuffles("four", "$16")])


LANE_VALUE = {name: lane_value(table) for name, table in TABLES.items()}
SHUFFLED = shuffled()
OF_WORDS = of_words()


def scaled(table: tuple[float, ...], half: str) -> str:
    """PTX: the table times the float32 $8, each product rounded once, as 16 numbers of 16 bits ("bf16", "f16"). $0 to $3 hold
    their low bytes, four to a register, $4 to $7 the high ones."""
    lines = [".reg .f32 w<16>;", ".reg .b32 pair<8>;"]
    lines += [f"mul.rn.f32 w{i}, $8, 0f{struct.pack('>f', v).hex()};" for i, v in enumerate(table)]
    lines += [f"cvt.rn.{half}x2.f32 pair{i}, w{2 * i + 1}, w{2 * i};" for i in range(8)]
    for i in range(4):
        lines += [
            f"prmt.b32 ${i + at}, pair{2 * i}, pair{2 * i + 1}, {bytes_};" for at, bytes_ in ((0, "0x6420"), (4, "0x7531"))
        ]
    return _block(lines)


def picked(high_first: bool) -> str:
    """PTX: what the nibbles of $8 stand for in the table of ``scaled``, $9 to $16, as $0 to $7 in the order of the weights."""
    lines = [
        ".reg .b32 code, pick, codes, picks, neg, pos, lo, hi, pair;",
        "and.b32 code, $8, 0x77777777;",
        "shr.b32 pick, $8, 1;",
        "lop3.b32 pick, pick, 0x44444444, 0x32103210, 0xEA;",
    ]
    for half in (0, 1):
        lines += [f"shr.b32 codes, code, {16 * half};", f"shr.b32 picks, pick, {16 * half};"]
        for plane, at in (("lo", 9), ("hi", 13)):
            lines += [
                f"prmt.b32 neg, ${at}, ${at + 1}, codes;",
                f"prmt.b32 pos, ${at + 2}, ${at + 3}, codes;",
                f"prmt.b32 {plane}, neg, pos, picks;",
            ]
        for byte, two in ((0, "0x4051" if high_first else "0x5140"), (1, "0x6273" if high_first else "0x7362")):
            first = 4 * half + 2 * byte
            lines += [f"prmt.b32 pair, lo, hi, {two};", f"mov.b32 {{${first}, ${first + 1}}}, pair;"]
    return _block(lines)


SCALED = {half: {name: scaled(table, half) for name, table in TABLES.items()} for half in ("bf16", "f16")}
PICKED = {high_first: picked(high_first) for high_first in (False, True)}
