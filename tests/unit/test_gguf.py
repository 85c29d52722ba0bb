# SPDX-License-Identifier: Apache-2.0
"""The header parser, with gguf-py as the oracle for what is right."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import gpubox.gguf
import pytest
from gpubox.errors import GpuboxError
from gpubox.gguf import MAX_TENSORS, QUANTIZATION_TYPES, Header, read_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    METADATA,
    STRING,
    TENSORS,
    U8,
    U16,
    U32,
    U64,
    GgufFile,
    TensorData,
    key_value,
    string,
)
from tests.unit.gguf_mutations import HUGE, fields_of, mutated
from tests.unit.timing import AT_ONCE

GOOD = GgufFile(METADATA, TENSORS)
ONE_EACH = tuple(
    (f"one.{number}", number, content)
    for number, content in [
        (U8, 200),
        (I8, -100),
        (U16, 60000),
        (I16, -30000),
        (U32, 4_000_000_000),
        (I32, -2_000_000_000),
        (F32, 0.25),
        (BOOL, False),
        (STRING, "ä\n"),
        (U64, 2**63),
        (I64, -(2**62)),
        (F64, 1e300),
    ]
)


def write(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(path: Path) -> GpuboxError:
    with pytest.raises(GpuboxError) as caught:
        read_header(path)
    assert path.name in caught.value.measured
    return caught.value


@pytest.mark.parametrize("version", [2, 3])
def test_reads_what_gguf_py_reads(tmp_path: Path, version: int) -> None:
    path = write(tmp_path, replace(GOOD, version=version).to_bytes())
    header, oracle = read_header(path), gguf.GGUFReader(path)
    assert header.version == version
    assert [tensor.name for tensor in header.tensors] == [t.name for t in oracle.tensors]
    for ours, theirs in zip(header.tensors, oracle.tensors, strict=True):
        assert list(ours.dimensions) == list(theirs.shape)
        assert ours.size == theirs.n_bytes
        assert header.data_start(32) + ours.offset == theirs.data_offset
    assert header.layout_fault(32) is None


def test_every_value_type_is_decoded_and_located(tmp_path: Path) -> None:
    path = write(tmp_path, GgufFile(ONE_EACH).to_bytes())
    keys = read_header(path).keys
    assert {name: entry.value for name, entry in keys.items()} == {
        name: content for name, _, content in ONE_EACH
    }
    content = path.read_bytes()
    for key in ONE_EACH:
        entry = keys[key[0]]
        assert content[entry.start : entry.end] == key_value(key)


def test_types_are_those_of_gguf_py() -> None:
    known = {int(number): (number.name, *sizes) for number, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {
        number: (kind.name, kind.block, kind.size) for number, kind in QUANTIZATION_TYPES.items()
    }
    assert ours == known


def test_arrays_of_every_type_are_skipped(tmp_path: Path) -> None:
    arrays = tuple(
        (f"array.{number}", ARRAY, (number, [content] * 5)) for _, number, content in ONE_EACH
    )
    path = write(tmp_path, GgufFile((*arrays, ("last", U8, 7))).to_bytes())
    keys = read_header(path).keys
    assert keys["last"].value == 7
    assert all(keys[name].value is None for name, *_ in arrays)


@pytest.mark.parametrize(
    "sizes",
    [
        [0] * 3000,
        [127] * 2500,
        [128] * 2500,
        [5] * 1023,
        [5] * 1024,
        [5] * 1025,
        [*[9] * 1500, 2 << 20, *[0, 126, 127, 128, 255, 256, 257, 65536] * 300, *[1] * 2049],
        [300_000] * 12,
    ],
    ids=len,
)
@pytest.mark.parametrize("byte", [b"\0", b"\x07", b"\n"])
def test_arrays_of_strings_end_where_they_end(
    tmp_path: Path, sizes: list[int], byte: bytes
) -> None:
    """Batches of short strings, long ones, and both across the reads of the file."""
    key = ("tokens", ARRAY, (STRING, [byte * size for size in sizes]))
    path = write(tmp_path, GgufFile((key, ("last", U8, 7)), TENSORS).to_bytes())
    header = read_header(path)
    assert header.keys["tokens"].end - header.keys["tokens"].start == len(key_value(key))
    assert header.keys["last"].value == 7
    assert len(header.tensors) == len(TENSORS)
    cut = write(tmp_path, path.read_bytes()[: header.keys["tokens"].end - 1])
    assert "truncated" in refusal(cut).measured


def test_a_large_vocabulary_costs_little_memory(tmp_path: Path) -> None:
    token = string("token")
    count = 1_200_000
    vocabulary = string("tokens") + struct.pack("<IIQ", ARRAY, STRING, count) + token * count
    rest = GgufFile((("general.architecture", STRING, "x" * 100_000), ("last", U8, 7)), TENSORS)
    content = bytearray(rest.to_bytes())
    content[24:24] = vocabulary
    content[16:24] = struct.pack("<Q", 3)
    path = write(tmp_path, bytes(content))
    assert len(vocabulary) > 8 << 20
    del content, vocabulary
    tracemalloc.start()
    try:
        header = read_header(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert header.keys["last"].value == 7
    assert header.keys["general.architecture"].value is None  # long strings are not kept
    assert len(header.tensors) == len(TENSORS)
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "empty (0 bytes)", id="empty"),
        pytest.param(bytes(100_000), "zero bytes", id="zero-filled"),
        pytest.param(b"\n <!DOCTYPE html><html>Sign in</html>", "HTML page", id="html"),
        pytest.param(b"<html lang=en>", "HTML page", id="html-without-doctype"),
        pytest.param(b'<?xml version="1.0"?><Error><Code>AccessDenied', "XML", id="s3-error"),
        pytest.param(b'{"error": "Repository not found"}', "JSON", id="json-error"),
        pytest.param(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00ff\nsize 49012345678\n",
            "Git LFS pointer for 49012345678 bytes",
            id="lfs-pointer",
        ),
        pytest.param(struct.pack("<Q", 40) + b'{"a":{}}' * 9, "safetensors", id="safetensors"),
        pytest.param(b"lmgg" + bytes(range(64)), "before GGUF", id="ggml"),
        pytest.param(b"\x7fELF" + bytes(range(64)), "begins with b'\\x7fELF'", id="other"),
        pytest.param(b"GG", "truncated", id="half-a-magic"),
        pytest.param(b"GGUF\3\0", "truncated", id="only-the-start"),
        pytest.param(b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian", id="big-endian"),
        pytest.param(b"GGUF" + struct.pack("<IQQ", 9, 1, 1), "version 9", id="version-9"),
        pytest.param(b"GGUF" + struct.pack("<III", 1, 1, 1), "version 1", id="version-1"),
    ],
)
def test_says_what_a_file_is_instead(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in str(refusal(write(tmp_path, content)))


def test_a_missing_file_a_folder_and_a_pipe_are_named(tmp_path: Path) -> None:
    assert "none.gguf: missing" in refusal(tmp_path / "none.gguf").measured
    assert "not a regular file" in refusal(tmp_path).measured
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)  # opening it would wait for a writer
    assert "not a regular file" in refusal(pipe).measured


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (GOOD.with_key(("general.alignment", U32, 0)), "general.alignment is 0"),
        (GOOD.with_key(("general.alignment", U32, 48)), "general.alignment is 48"),
        (GOOD.with_key(("general.alignment", STRING, "32")), "general.alignment is '32'"),
        (replace(GOOD, keys=(METADATA[0], METADATA[0])), "appears twice"),
        (replace(GOOD, tensors=(TENSORS[0], TENSORS[0])), "output.weight appears twice"),
        (replace(GOOD, tensors=(TensorData("t", (1,) * 5),)), "5 dimensions"),
        (replace(GOOD, tensors=(TensorData("t", (255,), (12, 1, 1)),)), "rows of 255"),
        (replace(GOOD, tensors=(TensorData("t", (1,), (77, 1, 1)),)), "quantization type 77"),
        (replace(GOOD, tensors=(TensorData("a\0b", (1,)),)), "NUL"),
        (replace(GOOD, tensors=(TensorData("", (1,)),)), "0 bytes"),
        (GOOD.with_key(("a", ARRAY, (ARRAY, []))), "array of arrays"),
    ],
)
def test_a_damaged_header_is_explained(tmp_path: Path, file: GgufFile, words: str) -> None:
    assert words in refusal(write(tmp_path, file.to_bytes())).measured


@pytest.mark.parametrize(
    ("position", "number"),
    [(8, MAX_TENSORS + 1), (8, 2**64 - 1), (16, 2**64 - 1), (24, 2**64 - 1), (24, 2**40)],
)
def test_absurd_lengths_are_refused_at_once(tmp_path: Path, position: int, number: int) -> None:
    content = bytearray(GOOD.to_bytes())
    content[position : position + 8] = struct.pack("<Q", number)
    path = write(tmp_path, bytes(content))
    started = time.monotonic()
    told = refusal(path).measured
    assert time.monotonic() - started < AT_ONCE
    assert "it announces" in told if position < 24 else "key of" in told


def test_an_endless_array_of_strings_in_a_huge_sparse_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpubox.gguf.MAX_HEADER < 1 << 30
    monkeypatch.setattr(gpubox.gguf, "MAX_HEADER", 8 << 20)  # seconds less
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    head += string("tokens") + struct.pack("<IIQ", ARRAY, STRING, 2**60)
    path = write(tmp_path, head)
    with path.open("r+b") as stream:
        stream.truncate(300 << 30)  # zeros: 40 billion empty strings
    started = time.monotonic()
    assert "longer than" in refusal(path).measured
    assert time.monotonic() - started < AT_ONCE


def layout(tmp_path: Path, content: bytes) -> str | None:
    header: Header = read_header(write(tmp_path, content))
    fault = header.layout_fault(header.own_alignment or 32)
    return None if fault is None else fault.measured


def test_the_length_of_the_file_is_held_to_the_header(tmp_path: Path) -> None:
    content = GOOD.to_bytes()
    unpadded = replace(GOOD, pad_end=False).to_bytes()
    assert len(content) - len(unpadded) == 20
    assert layout(tmp_path, content) is None
    assert layout(tmp_path, unpadded) is None
    assert "truncated, 1 bytes are missing" in str(layout(tmp_path, unpadded[:-1]))
    assert "1 more" not in str(layout(tmp_path, content))
    assert "21 more" in str(layout(tmp_path, content + b"x"))
    assert "concatenated" in str(layout(tmp_path, content + content))
    assert "concatenated" in str(layout(tmp_path, unpadded + content))


def test_overlapping_and_misaligned_tensors_are_refused(tmp_path: Path) -> None:
    file = replace(GOOD, tensors=(TensorData("a", (64,)), TensorData("b", (64,))))
    content = file.to_bytes()
    end = len(file.header())
    for offset, words in (
        (0, "tensors a and b overlap at byte 0"),
        (272, "a multiple of the alignment 32"),
        (2**62, "bytes are missing"),
    ):
        moved = content[: end - 8] + struct.pack("<Q", offset) + content[end:]
        path = write(tmp_path, moved)
        fault = read_header(path).layout_fault(32)
        assert fault is not None
        assert words in str(fault)
    path = write(tmp_path, content[: end - 8] + struct.pack("<Q", 2**63) + content[end:])
    assert "64-bit size" in refusal(path).wanted


MALFORMED = (
    *ONE_EACH,
    ("array.strings", ARRAY, (STRING, ["a", "", "b" * 200] * 700)),
    ("array.numbers", ARRAY, (U16, list(range(300)))),
    ("general.alignment", U32, 32),
)


def test_the_fields_are_those_of_the_header() -> None:
    file = GgufFile(MALFORMED, TENSORS)
    assert b"".join(data for _, data in fields_of(file)) == file.header()


def read_or_refused(path: Path) -> None:
    """What must hold whatever the file is: a header or a message, soon, in little memory."""
    tracemalloc.start()
    started = time.monotonic()
    try:
        header = read_header(path)
    except GpuboxError as error:
        told = error.measured
        text = str(error)
    else:
        told = text = str(path)
        header.layout_fault(header.own_alignment or 32)
        assert header.end <= header.size
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert path.name in told
    assert time.monotonic() - started < AT_ONCE
    assert peak < 8 << 20
    text.encode("utf-8", "backslashreplace")


@pytest.mark.parametrize("filled", [False, True], ids=["cut", "a hole behind"])
def test_a_header_that_ends_in_any_field_is_refused(tmp_path: Path, filled: bool) -> None:
    """At its beginning, behind its first byte and before its last one."""
    end = 0
    fields = fields_of(GgufFile(MALFORMED, TENSORS))
    header = b"".join(data for _, data in fields)
    for _, data in fields:
        for at in {end, end + 1, end + len(data) - 1}:
            path = write(tmp_path, header[:at])
            if filled:
                os.truncate(path, 1 << 30)
                read_or_refused(path)
            else:
                assert refusal(path)
        end += len(data)


@pytest.mark.parametrize("number", HUGE)
def test_any_length_count_or_type_may_be_anything(tmp_path: Path, number: int) -> None:
    """Every one of them in turn."""
    fields = fields_of(GgufFile(MALFORMED, TENSORS))
    for place, (kind, _) in enumerate(fields):
        if kind not in ("u32", "u64"):
            continue
        data = struct.pack("<I", number % 2**32) if kind == "u32" else struct.pack("<Q", number)
        changed = [one for _, one in fields]
        changed[place] = data
        path = write(tmp_path, b"".join(changed) + bytes(4096))
        read_or_refused(path)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_mutation_crashes_hangs_or_eats_memory(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write(
        tmp_path_factory.getbasetemp(), mutated(data, GgufFile(MALFORMED, TENSORS)), "mutated.gguf"
    )
    if data.draw(st.booleans()):
        os.truncate(path, data.draw(st.sampled_from([0, 100, 5000, 1 << 20, 1 << 34])))
    read_or_refused(path)
