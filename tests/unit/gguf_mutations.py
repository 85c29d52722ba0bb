# SPDX-License-Identifier: Apache-2.0
"""Headers of GGUF files taken apart, and made wrong in every way that we can think of."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

from tests.unit.gguf_files import ARRAY, STRING, GgufFile, string, value

# every field of the header: what it is, and its bytes
Field = tuple[str, bytes]
HUGE = [0, 1, 2**8, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def fields_of(file: GgufFile) -> list[Field]:
    """The header taken apart; joined again it is what `GgufFile.header` writes."""
    found = [("magic", b"GGUF"), ("u32", struct.pack("<I", file.version))]
    found += [("u64", struct.pack("<Q", len(group))) for group in (file.tensors, file.keys)]
    for name, number, content in file.keys:
        found += [("u64", string(name)[:8]), ("text", name.encode())]
        found.append(("u32", struct.pack("<I", number)))
        data = value(number, content)
        if number == ARRAY:
            found += [("u32", data[:4]), ("u64", data[4:12]), ("data", data[12:])]
        elif number == STRING:
            found += [("u64", data[:8]), ("text", data[8:])]
        else:
            found.append(("data", data))
    offset = 0
    for tensor in file.tensors:
        found += [("u64", string(tensor.name)[:8]), ("text", tensor.name.encode())]
        found.append(("u32", struct.pack("<I", len(tensor.dimensions))))
        found += [("u64", struct.pack("<Q", size)) for size in tensor.dimensions]
        found += [("u32", struct.pack("<I", tensor.kind[0])), ("u64", struct.pack("<Q", offset))]
        offset += tensor.size + -tensor.size % file.alignment
    return found


def mutated(data: st.DataObject, file: GgufFile, most: int = 4) -> bytes:
    """The header of ``file`` with one to ``most`` changes."""
    fields = [one for _, one in fields_of(file)]
    kinds = ["flip", "number", "text", "twice", "swap", "drop", "insert", "cut", "array"]
    for _ in range(data.draw(st.integers(1, most))):
        place = data.draw(st.integers(0, len(fields) - 1))
        kind = data.draw(st.sampled_from(kinds))
        old = fields[place]
        if kind == "flip" and old:
            at = data.draw(st.integers(0, len(old) - 1))
            bit = 1 << data.draw(st.integers(0, 7))
            fields[place] = old[:at] + bytes([old[at] ^ bit]) + old[at + 1 :]
        elif kind == "number":
            number = data.draw(st.one_of(st.sampled_from(HUGE), st.integers(0, 2**64 - 1)))
            fields[place] = struct.pack("<Q", number)[: len(old)]
        elif kind == "text":  # of the same length, no UTF-8
            fields[place] = data.draw(st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\0"])) * len(old)
            fields[place] = fields[place][: len(old)]
        elif kind == "twice":  # keys and tensors that repeat
            length = data.draw(st.integers(1, 8))
            fields[place:place] = fields[place : place + length]
        elif kind == "swap":
            other = data.draw(st.integers(0, len(fields) - 1))
            fields[place], fields[other] = fields[other], fields[place]
        elif kind == "drop":
            del fields[place : place + data.draw(st.integers(0, 4))]
        elif kind == "insert":
            fields.insert(place, data.draw(st.binary(min_size=1, max_size=40)))
        elif kind == "array":  # one in the other, as deep as it is long
            fields.insert(place, struct.pack("<IQ", ARRAY, 1) * data.draw(st.integers(1, 3000)))
        elif kind == "cut":
            del fields[place + 1 :]
        if not fields:
            fields = [b""]
    return b"".join(fields)
