# SPDX-License-Identifier: Apache-2.0
"""Reads the header of a GGUF file in bounded memory and time, from whatever the file really is.

Format: ggml docs/gguf.md, versions 2 and 3, little-endian. Scalars and strings are decoded; arrays
(a vocabulary can be tens of MiB) are skipped by their size. Nothing behind the header is read.
"""

from __future__ import annotations

import enum
import functools
import math
import os
import re
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import GpuboxError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes, where general.alignment is absent
KEY_ALIGNMENT = "general.alignment"
KEY_ARCHITECTURE = "general.architecture"
KEY_QUANTIZATION_VERSION = "general.quantization_version"
KEY_SPLIT_NO = "split.no"
KEY_SPLIT_COUNT = "split.count"
KEY_SPLIT_TENSORS_COUNT = "split.tensors.count"

# Bounds that no real model comes near: they keep a damaged length from costing memory or hours.
MAX_HEADER = 256 << 20  # bytes
MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 17
MAX_NAME = (1 << 16) - 1  # bytes, the specification's limit for keys
MAX_KEPT_STRING = 1 << 16  # bytes; longer values are known by their length only
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
MAX_ELEMENTS = (1 << 63) - 1  # ggml counts elements and bytes in 64 bits

_READ_SIZE = 1 << 20  # bytes a read
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BEHIND_NAME = [struct.Struct(f"<{count}QIQ") for count in range(MAX_DIMENSIONS + 1)]
"""Of a tensor, by the number of dimensions: these, type, offset."""
_BATCH = 1024  # strings of an array that are skipped at once
_SHORT = 128  # bytes; shorter are nearly all strings of a vocabulary


class ValueType(enum.IntEnum):
    """Types of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_SCALARS = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True)
class QuantizationType:
    """A tensor type of ggml: ``block`` elements are stored in ``size`` bytes."""

    name: str
    block: int
    size: int


# ggml/include/ggml.h and the block structures of ggml/src/ggml-common.h
QUANTIZATION_TYPES = {
    0: QuantizationType("F32", 1, 4),
    1: QuantizationType("F16", 1, 2),
    2: QuantizationType("Q4_0", 32, 18),
    3: QuantizationType("Q4_1", 32, 20),
    6: QuantizationType("Q5_0", 32, 22),
    7: QuantizationType("Q5_1", 32, 24),
    8: QuantizationType("Q8_0", 32, 34),
    9: QuantizationType("Q8_1", 32, 40),
    10: QuantizationType("Q2_K", 256, 84),
    11: QuantizationType("Q3_K", 256, 110),
    12: QuantizationType("Q4_K", 256, 144),
    13: QuantizationType("Q5_K", 256, 176),
    14: QuantizationType("Q6_K", 256, 210),
    15: QuantizationType("Q8_K", 256, 292),
    16: QuantizationType("IQ2_XXS", 256, 66),
    17: QuantizationType("IQ2_XS", 256, 74),
    18: QuantizationType("IQ3_XXS", 256, 98),
    19: QuantizationType("IQ1_S", 256, 50),
    20: QuantizationType("IQ4_NL", 32, 18),
    21: QuantizationType("IQ3_S", 256, 110),
    22: QuantizationType("IQ2_S", 256, 82),
    23: QuantizationType("IQ4_XS", 256, 136),
    24: QuantizationType("I8", 1, 1),
    25: QuantizationType("I16", 1, 2),
    26: QuantizationType("I32", 1, 4),
    27: QuantizationType("I64", 1, 8),
    28: QuantizationType("F64", 1, 8),
    29: QuantizationType("IQ1_M", 256, 56),
    30: QuantizationType("BF16", 1, 2),
    34: QuantizationType("TQ1_0", 256, 54),
    35: QuantizationType("TQ2_0", 256, 66),
    39: QuantizationType("MXFP4", 32, 17),
    40: QuantizationType("NVFP4", 64, 36),
    41: QuantizationType("Q1_0", 128, 18),
}


@dataclass(frozen=True)
class KeyValue:
    """One metadata record.

    ``value`` is None for arrays and for strings over 64 KiB. ``start`` and ``end`` are the extent
    of the whole record in the file, so that it can be copied byte for byte.
    """

    key: str
    value_type: ValueType
    value: int | float | bool | str | None
    start: int
    end: int

    @property
    def integer(self) -> int | None:
        """The value if it is an integer and no bool."""
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return self.value
        return None


@dataclass(frozen=True)
class Tensor:
    """One record of the tensor table. Dimensions as stored: the contiguous one first."""

    name: str
    dimensions: tuple[int, ...]
    quantization_type_id: int
    offset: int  # bytes from the start of the data section

    @property
    def quantization_type(self) -> QuantizationType:
        """The type's name and block size."""
        return QUANTIZATION_TYPES[self.quantization_type_id]

    @property
    def size(self) -> int:
        """Bytes of data, without padding."""
        elements = math.prod(self.dimensions)
        return elements // self.quantization_type.block * self.quantization_type.size


@dataclass(frozen=True)
class Identity:
    """What tells one state of a file from another without reading it."""

    device: int
    inode: int
    size: int  # bytes
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """Identity from a stat result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Header:
    """A parsed header."""

    path: Path
    identity: Identity
    version: int
    keys: dict[str, KeyValue]
    tensors: tuple[Tensor, ...]
    end: int  # bytes from the start of the file to behind the tensor table

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.identity.size

    @property
    def own_alignment(self) -> int | None:
        """general.alignment in bytes, if the file says it."""
        entry = self.keys.get(KEY_ALIGNMENT)
        return None if entry is None else entry.integer

    def data_start(self, alignment: int) -> int:
        """Offset of the data section in the file, in bytes."""
        return padded(self.end, alignment)

    def data_end(self, alignment: int) -> int:
        """Offset behind the last tensor's last byte (padding not counted)."""
        if not self.tensors:
            return self.end
        start = self.data_start(alignment)
        return start + max(tensor.offset + tensor.size for tensor in self.tensors)

    def layout_fault(self, alignment: int) -> GpuboxError | None:
        """What is wrong with the tensors' extents for this alignment, or None.

        Every tensor must lie on the alignment, none may overlap another, and the file must end
        where the last one does, its padding allowed (it is the padding that a truncated or
        concatenated file lacks or exceeds).
        """
        previous: Tensor | None = None
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.offset):
            if tensor.offset % alignment:
                return _error(
                    self.path,
                    f"tensor {tensor.name} starts at byte {tensor.offset} of the data section",
                    f"a multiple of the alignment {alignment}",
                    FETCH_AGAIN,
                )
            if previous is not None and tensor.offset < previous.offset + previous.size:
                return _error(
                    self.path,
                    f"tensors {previous.name} and {tensor.name} overlap at byte {tensor.offset}",
                    "tensors with bytes of their own",
                    FETCH_AGAIN,
                )
            previous = tensor
        end = self.data_end(alignment)
        if self.size < end:
            return _error(
                self.path,
                f"{self.size} bytes: truncated, {end - self.size} bytes are missing",
                f"{end} bytes, as the header describes",
                FETCH_AGAIN,
            )
        if self.size > padded(end, alignment):
            return self._surplus_fault(end, alignment)
        return None

    def _surplus_fault(self, end: int, alignment: int) -> GpuboxError:
        surplus = self.size - end
        with self.path.open("rb") as stream:
            for position in (end, padded(end, alignment)):
                stream.seek(position)
                if stream.read(len(MAGIC)) == MAGIC:
                    return _error(
                        self.path,
                        f"another GGUF file begins at byte {position}: concatenated, not merged",
                        "one GGUF file",
                        "Fetch the original shards again; joining them with cat makes no model.",
                    )
        return _error(
            self.path,
            f"{self.size} bytes, {surplus} more than the header describes",
            f"{end} to {padded(end, alignment)} bytes",
            FETCH_AGAIN,
        )


FETCH_AGAIN = "Fetch this file again and compare its size and sha256 with the source's."


def padded(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def _error(path: Path, found: str, wanted: str, remedy: str) -> GpuboxError:
    return GpuboxError(f"{path}: {found}", wanted, remedy)


def read_header(path: Path) -> Header:
    """Parse the header of ``path``.

    Raises:
        GpuboxError: the file is missing, unreadable, no GGUF, or its header is damaged; the text
            names the file and says what it is instead.
    """
    try:
        # a FIFO would block in open()
        if not stat.S_ISREG(path.stat().st_mode):
            raise _error(path, "not a regular file", "a GGUF file", "Name a file.")
        with path.open("rb", buffering=0) as stream:
            status = os.fstat(stream.fileno())
            return _Parser(path, Identity.of(status), stream).parse()
    except FileNotFoundError:
        raise _error(
            path, "missing", "a GGUF file", "Fetch this file, or correct the path."
        ) from None
    except ValueError as error:  # of the path: a NUL byte, or what no encoding has
        raise _error(path, str(error), "the path of a file", "Correct the path.") from None
    except OSError as error:
        raise _error(
            path,
            f"cannot be read ({error.strerror})",
            "a readable file",
            "Correct its permissions or the disk's fault.",
        ) from error


def _looks_like(start: bytes, size: int) -> tuple[str, str]:
    """What a file that is no GGUF is instead, and the remedy."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start.strip(b"\0"):
        return (
            f"begins with {len(start)} zero bytes: space was allocated, the content never came",
            "Let the download finish, or fetch this file again.",
        )
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return (
            "an HTML page: the server answered with a page (login, error) instead of the file",
            "Fetch this file again from its raw address, with the credentials it needs.",
        )
    if text.startswith(b"<?xml"):
        return (
            "an XML document: an object store's error answer was saved instead of the file",
            "Fetch this file again, with the credentials it needs.",
        )
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        wanted = [line for line in start.splitlines() if line.startswith(b"size ")]
        told = f" for {wanted[0][5:25].decode('ascii', 'replace')} bytes" if wanted else ""
        return f"a Git LFS pointer{told}, not the content", "Run `git lfs pull` in that clone."
    if text.startswith(b"{"):
        return (
            "a JSON document: a server's error answer was saved instead of the file",
            "Fetch this file again, with the credentials it needs.",
        )
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return (
            "a GGML file from before GGUF",
            "Fetch the model as GGUF; llama.cpp dropped the older format in 2023.",
        )
    if len(start) > 9 and start[8:9] == b"{" and _U64.unpack_from(start)[0] < size:
        return "a safetensors file", "Name the GGUF files of the model."
    return f"begins with {start[:4]!r}", FETCH_AGAIN


@functools.cache
def _short_strings() -> re.Pattern[bytes]:
    """Matches `_BATCH` short strings in a row: of each the lowest byte of the length, seven zeros
    and as many bytes.

    Half the time of a loop in Python. Nothing is tried twice: the first byte decides.
    """
    strings = (re.escape(bytes([size])) + rb"\0{7}.{%d}" % size for size in range(_SHORT))
    return re.compile(rb"(?:%s){%d}+" % (b"|".join(strings), _BATCH), re.DOTALL)


class _Parser:
    """Walks one header front to back with one buffer."""

    def __init__(self, path: Path, identity: Identity, stream: BinaryIO) -> None:
        self._path = path
        self._identity = identity
        self._stream = stream
        self._limit = min(identity.size, MAX_HEADER)
        self._buffer = b""
        self._base = 0  # file offset of the buffer's first byte
        self._at = 0  # index into the buffer

    def parse(self) -> Header:
        version = self._preamble()
        tensor_count = self._count("tensors", MAX_TENSORS, 24)
        key_count = self._count("metadata keys", MAX_KEYS, 13)
        keys: dict[str, KeyValue] = {}
        for _ in range(key_count):
            entry = self._key_value()
            if entry.key in keys:
                raise self._damaged(f"metadata key {entry.key} appears twice", "keys once each")
            keys[entry.key] = entry
        self._check_alignment(keys.get(KEY_ALIGNMENT))
        tensors: dict[str, Tensor] = {}
        for _ in range(tensor_count):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise self._damaged(f"tensor {tensor.name} appears twice", "tensors once each")
            tensors[tensor.name] = tensor
        end = self._base + self._at
        return Header(self._path, self._identity, version, keys, tuple(tensors.values()), end)

    def _preamble(self) -> int:
        size = self._identity.size
        if size == 0:
            raise _error(self._path, "empty (0 bytes)", "a GGUF file", FETCH_AGAIN)
        self._fill()
        start = self._buffer[:4096]
        if start[:4] != MAGIC:
            if MAGIC.startswith(start):
                raise self._truncated()
            found, remedy = _looks_like(start, size)
            raise _error(self._path, found, "a GGUF file", remedy)
        self._take(4)
        version = _U32.unpack(self._take(4))[0]
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (1, *VERSIONS):
                raise _error(
                    self._path,
                    f"big-endian (its version reads {version:#010x})",
                    "little-endian GGUF",
                    "Fetch the little-endian file, or convert it with gguf-py's "
                    "gguf_convert_endian.",
                )
            raise _error(
                self._path,
                f"GGUF version {version}",
                "version 2 or 3",
                "Fetch the model in a current version, or update gpubox if it is newer.",
            )
        return int(version)

    def _damaged(self, found: str, wanted: str) -> GpuboxError:
        position = self._base + self._at
        return _error(
            self._path, f"damaged header: {found} (near byte {position})", wanted, FETCH_AGAIN
        )

    def _truncated(self) -> GpuboxError:
        if self._identity.size > self._limit:
            return self._damaged(f"it is longer than {self._limit} bytes", "a real model's header")
        return _error(
            self._path,
            f"{self._identity.size} bytes: truncated or damaged, the header reaches beyond",
            "a whole header",
            FETCH_AGAIN,
        )

    # -- bytes

    def _fill(self) -> None:
        """Load the buffer from the current position."""
        position = self._base + self._at
        self._stream.seek(position)
        self._buffer = self._stream.read(_READ_SIZE)
        self._base, self._at = position, 0

    def _move(self, position: int) -> None:
        """Continue at the file offset ``position``."""
        if position > self._limit:
            raise self._truncated()
        index = position - self._base
        if index <= len(self._buffer):
            self._at = index
        else:
            self._buffer, self._base, self._at = b"", position, 0

    def _take(self, size: int) -> bytes:
        """The next bytes, at most `_READ_SIZE`."""
        if self._base + self._at + size > self._limit:
            raise self._truncated()
        if self._at + size > len(self._buffer):
            self._fill()
            if size > len(self._buffer):  # the file became shorter
                raise self._truncated()
        start = self._at
        self._at = start + size
        return self._buffer[start : self._at]

    def _skip(self, size: int) -> None:
        self._move(self._base + self._at + size)

    def _skip_strings(self, count: int) -> None:
        """Skip ``count`` strings, each a length and its bytes.

        A vocabulary has hundreds of thousands: a batch of short ones is matched at once. The bare
        loop takes those that are left over, long, or reach behind the buffer; it ends, by an
        exception, where the next length is not in the buffer.
        """
        unpack = _U64.unpack_from
        while count:
            if count >= _BATCH and (batch := _short_strings().match(self._buffer, self._at)):
                self._move(self._base + batch.end())
                count -= _BATCH
                continue
            buffer, at = self._buffer, self._at
            done, wanted = 0, min(count, _BATCH)
            try:
                for done in range(wanted):  # noqa: B007
                    at += 8 + unpack(buffer, at)[0]
                done = wanted
            except (struct.error, OverflowError):
                pass
            count -= done
            self._move(self._base + at)
            if done < wanted:
                self._fill()
                if len(self._buffer) < _U64.size:
                    raise self._truncated()

    # -- records

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _count(self, what: str, bound: int, least: int) -> int:
        """A number of records that take at least ``least`` bytes each."""
        count = self._u64()
        if count > bound or count * least > self._limit:
            raise self._damaged(f"it announces {count} {what}", f"at most {bound}, within the file")
        return count

    def _name(self, what: str) -> str:
        size = self._u64()
        if not 0 < size <= MAX_NAME:
            raise self._damaged(f"a {what} of {size} bytes", f"1 to {MAX_NAME} bytes")
        name = self._take(size)
        if b"\0" in name:
            raise self._damaged(f"a {what} with a NUL byte: {name[:64]!r}", "a name without")
        return name.decode("utf-8", "surrogateescape")

    def _value_type(self, key: str) -> ValueType:
        number = self._u32()
        try:
            return ValueType(number)
        except ValueError:
            raise self._damaged(
                f"metadata key {key} has value type {number}", f"0 to {max(ValueType)}"
            ) from None

    def _key_value(self) -> KeyValue:
        start = self._base + self._at
        key = self._name("metadata key")
        value_type = self._value_type(key)
        value: int | float | bool | str | None = None
        if value_type is ValueType.ARRAY:
            self._skip_array(key)
        elif value_type is ValueType.STRING:
            size = self._u64()
            if size <= MAX_KEPT_STRING:
                value = self._take(size).decode("utf-8", "surrogateescape")
            else:
                self._skip(size)
        else:
            scalar = _SCALARS[value_type]
            value = scalar.unpack(self._take(scalar.size))[0]
        return KeyValue(key, value_type, value, start, self._base + self._at)

    def _skip_array(self, key: str) -> None:
        element_type = self._value_type(key)
        count = self._u64()
        if element_type is ValueType.STRING:
            self._skip_strings(count)
        elif element_type is ValueType.ARRAY:
            raise self._damaged(f"metadata key {key} is an array of arrays", "a flat array")
        else:
            self._skip(count * _SCALARS[element_type].size)

    def _check_alignment(self, entry: KeyValue | None) -> None:
        if entry is None:
            return
        alignment = entry.integer
        if entry.value_type is not ValueType.UINT32 or not alignment or alignment & (alignment - 1):
            raise self._damaged(
                f"{KEY_ALIGNMENT} is {entry.value!r} ({entry.value_type.name})",
                "a power of two as UINT32",
            )

    def _tensor(self) -> Tensor:
        name = self._name("tensor name")
        count = self._u32()
        if count > MAX_DIMENSIONS:
            raise self._damaged(
                f"tensor {name} has {count} dimensions", f"at most {MAX_DIMENSIONS}"
            )
        rest = _BEHIND_NAME[count]
        *dimensions, type_id, offset = rest.unpack(self._take(rest.size))
        quantization_type = QUANTIZATION_TYPES.get(type_id)
        if quantization_type is None:
            raise _error(
                self._path,
                f"tensor {name} has quantization type {type_id}",
                f"one of {', '.join(known.name for known in QUANTIZATION_TYPES.values())}",
                "Fetch this file again; if it is right, the type is newer than this gpubox.",
            )
        elements = math.prod(dimensions)
        row = dimensions[0] if dimensions else 1
        if row % quantization_type.block:
            raise self._damaged(
                f"tensor {name} has rows of {row} elements of type {quantization_type.name}",
                f"a multiple of the block size {quantization_type.block}",
            )
        size = elements // quantization_type.block * quantization_type.size
        if max(elements, size, offset + size) > MAX_ELEMENTS:
            raise self._damaged(
                f"tensor {name} of dimensions {dimensions} at byte {offset}", "a 64-bit size"
            )
        return Tensor(name, tuple(dimensions), type_id, offset)
