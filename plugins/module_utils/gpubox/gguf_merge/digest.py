# SPDX-License-Identifier: Apache-2.0
"""Digests fast enough to be taken while copying.

XXH3 with 128 bits from libxxhash.so.0, which apt itself needs, so it is on every Debian and Ubuntu
box without a package of ours; ``xxh128sum`` prints the same. Where it is missing, BLAKE2b of
Python's own library (``b2sum``). Whichever it was is named beside every digest that is kept.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import GpuboxError

XXH128 = "xxh128"
BLAKE2B = "blake2b"
_LIBRARY = "libxxhash.so.0"
PIECE = 512 << 10  # bytes


class Digest(Protocol):
    """A running digest. ``hexdigest`` may be asked for on the way."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes, from writable memory."""

    def hexdigest(self) -> str:
        """Of the bytes so far."""


class _Hash128(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
        library.XXH3_createState.restype = ctypes.c_void_p
        library.XXH3_freeState.argtypes = (ctypes.c_void_p,)
        library.XXH3_128bits_reset.argtypes = (ctypes.c_void_p,)
        _update_of(library).argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        library.XXH3_128bits_digest.argtypes = (ctypes.c_void_p,)
        library.XXH3_128bits_digest.restype = _Hash128
    except (OSError, AttributeError):  # none, or one from before XXH3 was stable (0.8)
        return None
    return library


def _update_of(library: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    """On x86 the one that uses the widest vectors of this processor, not those of the oldest."""
    plain = library.XXH3_128bits_update
    return getattr(library, "XXH3_128bits_update_dispatch", plain)


class _Xxh128:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._update = _update_of(library)
        self._state = ctypes.c_void_p(library.XXH3_createState())
        weakref.finalize(self, library.XXH3_freeState, self._state)
        library.XXH3_128bits_reset(self._state)

    def update(self, data: memoryview, /) -> None:
        if data:
            start = ctypes.addressof(ctypes.c_char.from_buffer(data))
            self._update(self._state, start, len(data))

    def hexdigest(self) -> str:
        value = self._library.XXH3_128bits_digest(self._state)
        return f"{value.high:016x}{value.low:016x}"


def preferred() -> str:
    """Name of the algorithm for new files."""
    return BLAKE2B if _library() is None else XXH128


def computable(algorithm: object) -> bool:
    """Whether this machine has the algorithm of that name."""
    return algorithm == BLAKE2B or (algorithm == XXH128 and _library() is not None)


def new(algorithm: str) -> Digest:
    """A digest that has seen nothing.

    Raises:
        GpuboxError: this machine cannot compute it.
    """
    library = _library()
    if algorithm == XXH128 and library is not None:
        return _Xxh128(library)
    if algorithm == BLAKE2B:
        return hashlib.blake2b()
    raise GpuboxError(
        f"{_LIBRARY} is not on this machine" if algorithm == XXH128 else f"digest {algorithm!r}",
        f"a way to compute the digest {algorithm}",
        "Run apt-get install libxxhash0 and repeat.",
    )


@dataclass(frozen=True)
class Run:
    """The data of one shard inside the result, without the padding behind it."""

    source: int
    position: int  # bytes from the start of the result
    length: int

    @property
    def end(self) -> int:
        """Bytes from the start of the result to behind it."""
        return self.position + self.length


class Ledger:
    """Digests of a result that comes by front to back: of the whole and of each run."""

    def __init__(self, runs: Sequence[Run], algorithm: str) -> None:
        self.algorithm = algorithm
        self.position = 0  # bytes taken
        self._whole = new(algorithm)
        self._runs = [(run, new(algorithm)) for run in runs]
        self._first = 0  # of the runs that are not over

    def update(self, data: memoryview) -> None:
        """Take the bytes at `position`, in pieces that stay in the processor between two uses."""
        for start in range(0, len(data), PIECE):
            self._update(data[start : start + PIECE])

    def _update(self, data: memoryview) -> None:
        begin, end = self.position, self.position + len(data)
        self._whole.update(data)
        for run, digest in self._runs[self._first :]:
            if run.position >= end:
                break
            digest.update(data[max(run.position - begin, 0) : run.end - begin])
            if run.end <= end:
                self._first += 1
        self.position = end

    @property
    def whole(self) -> str:
        """Digest of all bytes so far."""
        return self._whole.hexdigest()

    @property
    def runs(self) -> list[str]:
        """Digest of each run."""
        return [digest.hexdigest() for _, digest in self._runs]
