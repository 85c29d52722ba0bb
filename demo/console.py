# SPDX-License-Identifier: Apache-2.0
"""Lines a person reads while something long runs: what is being done, and for how long so far."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 10.0  # seconds between two signs of life


def elapsed(seconds: float) -> str:
    """Render an age in seconds, for example ``2 min 05 s`` or ``3.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s"


class Console:
    """Prints numbered steps with their ages; remembers which one runs, for Ctrl-C."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self.interval = interval
        self.began = time.monotonic()
        self.current = ""

    def say(self, text: str) -> None:
        """Print one line at once, also into a pipe."""
        print(text, flush=True)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a step, show its age while it runs and its duration when it is done."""
        self.current = title
        began = time.monotonic()
        done = threading.Event()
        self.say(f"==> {title}")

        def watch() -> None:
            while not done.wait(self.interval):
                self.say(f"    … {title}: {elapsed(time.monotonic() - began)} so far")

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self.say(f"    done in {elapsed(time.monotonic() - began)}")

    def total(self) -> str:
        """Age of the whole run."""
        return elapsed(time.monotonic() - self.began)


def error(text: str) -> None:
    """Print an error where errors belong, after what was already printed."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
