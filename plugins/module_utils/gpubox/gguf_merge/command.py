# SPDX-License-Identifier: Apache-2.0
"""Command line: ``python -m gpubox.gguf_merge SHARD DEST``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import GpuboxError
from .destination import Space
from .merging import Method, Options, merge
from .progress import Rate


class Meter:
    """Progress on standard error: a line that moves on a terminal, else a line every 10 s."""

    def __init__(self) -> None:
        self._rate = Rate()
        self._terminal = sys.stderr.isatty()
        self._shown = time.monotonic()
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        line = self._rate.line(what, done, total)
        now = time.monotonic()
        due = now - self._shown >= (0.5 if self._terminal else 10) or what != self._what
        if not due and done < total:
            return
        self._shown, self._what = now, what
        end = "\n" if not self._terminal or done >= total else ""
        print(f"\r\x1b[K{line}" if self._terminal else line, end=end, file=sys.stderr, flush=True)


def read_sums(path: Path | None) -> dict[str, str]:
    """Name to digest of a list as ``sha256sum`` prints it.

    Raises:
        GpuboxError: it cannot be read, or is something else.
    """
    sums: dict[str, str] = {}
    if path is None:
        return sums
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            digest, _, name = line.partition(" ")
            if len(digest) != 64 or not set(digest.lower()) <= set("0123456789abcdef"):
                raise ValueError(f"a line {line[:80]!r}")
            sums[Path(name.lstrip(" *")).name] = digest
        if not sums:
            raise ValueError("empty")
    except (OSError, ValueError) as error:
        raise GpuboxError(
            f"{path}: {error}", "lines as sha256sum prints them", "Name such a list."
        ) from error
    return sums


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0 done, 1 refused or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m gpubox.gguf_merge",
        description="Merge GGUF shards into one file, identical to llama-gguf-split --merge. "
        "Interrupted, it goes on when it is run again.",
    )
    parser.add_argument("src", type=Path, help="any shard of the set")
    parser.add_argument("dest", type=Path, help="the merged file")
    parser.add_argument("--check", action="store_true", help="check everything, write nothing")
    parser.add_argument(
        "--verify", action="store_true", help="read the result again from the disk and compare"
    )
    parser.add_argument("--sha256sums", type=Path, metavar="FILE", help="list of all shards")
    parser.add_argument(
        "--method",
        choices=[str(method) for method in Method],
        default=str(Method.COPY),
        help="in_place: take the content away from the shards and remove them; "
        "reflink: share their blocks (XFS, btrfs; llama.cpp does not read the result)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    given = parser.parse_args(arguments)

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    def show(space: Space) -> None:
        if not given.quiet:
            print(space, file=sys.stderr)

    signal.signal(signal.SIGTERM, stop)
    try:
        options = Options(
            Method(given.method),
            given.verify,
            read_sums(given.sha256sums),
            progress=None if given.quiet else Meter(),
            notice=show,
        )
        result = merge(given.src, given.dest, given.check, options)
    except GpuboxError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was published, the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    would = "would be " if given.check and result.changed else ""
    digest = f", {result.digest}" if result.digest else ""
    line = (
        f"{would}{result.action}: {result.path}, {result.size} bytes, {result.tensors} tensors "
        f"from {len(result.sources)} files in {result.seconds:.1f} s{digest}"
    )
    print(line.encode("utf-8", "backslashreplace").decode())  # a name may be no text
    return 0
