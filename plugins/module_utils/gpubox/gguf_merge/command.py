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
from .merging import merge


class _Meter:
    """Progress on standard error: a line that moves on a terminal, else a line every 10 s."""

    def __init__(self) -> None:
        self._started = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < (0.5 if self._terminal else 10) and done < total:
            return
        self._shown = now
        elapsed = max(now - self._started, 1e-9)
        rate = done / elapsed
        left = (total - done) / rate if rate else 0
        text = (
            f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s, "
            f"{elapsed:.0f} s so far, {left:.0f} s left"
        )
        end = "\n" if not self._terminal or done >= total else ""
        print(f"\r\x1b[K{text}" if self._terminal else text, end=end, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0 done, 1 refused or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m gpubox.gguf_merge",
        description="Merge GGUF shards into one file, identical to llama-gguf-split --merge.",
    )
    parser.add_argument("src", type=Path, help="any shard of the set")
    parser.add_argument("dest", type=Path, help="the merged file")
    parser.add_argument("--check", action="store_true", help="check everything, write nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    try:
        result = merge(
            options.src, options.dest, options.check, None if options.quiet else _Meter()
        )
    except GpuboxError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was published", file=sys.stderr)
        return 128 + signal.SIGINT
    would = "would be " if options.check and result.changed else ""
    print(
        f"{would}{result.action}: {result.path}, {result.size} bytes, {result.tensors} tensors "
        f"from {len(result.sources)} files in {result.seconds:.1f} s"
    )
    return 0
