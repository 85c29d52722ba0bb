# SPDX-License-Identifier: Apache-2.0
"""How a long merge says where it is."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""


def stage(
    progress: Progress | None, what: str, total: int, before: int = 0
) -> Callable[[int], None] | None:
    """For a step that counts from 0, of which ``before`` bytes were done already."""
    if progress is None:
        return None
    return lambda done: progress(what, before + done, total)


class Rate:
    """Bytes, rate and time left of each stage, as a line for people."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what = ""
        self._began = 0.0
        self._before = 0

    def line(self, what: str, done: int, total: int) -> str:
        """For example ``copying: 12.30 of 402.10 GB, 1900 MB/s, 6 s so far, 205 s left``."""
        now = self._clock()
        if what != self._what:
            self._what, self._began, self._before = what, now, done
        elapsed = now - self._began
        text = f"{what}: {done / 1e9:.2f} of {total / 1e9:.2f} GB"
        if elapsed > 0 and done > self._before:
            rate = (done - self._before) / elapsed
            text += f", {rate / 1e6:.0f} MB/s, {elapsed:.0f} s so far"
            text += f", {(total - done) / rate:.0f} s left"
        return text
