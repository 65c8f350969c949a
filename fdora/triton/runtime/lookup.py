"""PTX that looks 4-bit codes up in registers, for kernels/decode.py."""

from __future__ import annotations

import struct

from fdora.quant import TABLES


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
            words = ["0x" + bytes(row[p] for row in rows[i : i + 4])[::-1].hex() for i in (0, 4, 8, 12)]
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
    return "{\n" + "\n".join(lines) + "\n}"


PTX = {name: lookup(table) for name, table in TABLES.items()}
