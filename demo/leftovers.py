# SPDX-License-Identifier: Apache-2.0
"""Ends what an interrupted playbook left at work. Runs in the box, with its python3 (see box.py).

``podman exec`` gives each command a session of its own, and a command goes on when its client on
the host is killed: an Ansible module may still be at work there, with its uv or pip.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

# a module in a file; a module that came through stdin (pipelining), below its become command
MARKS = (b"AnsiballZ_", b"BECOME-SUCCESS-")
Process = tuple[int, int, bytes]  # id, session, command line


def left_over(processes: Iterable[Process], own_session: int) -> list[int]:
    """Ids of the processes in sessions that a module runs in."""
    known = list(processes)
    sessions = {session for _, session, command in known if any(mark in command for mark in MARKS)}
    # 0: without a session, in another namespace; 1: systemd's
    sessions -= {own_session, 0, 1}
    return [number for number, session, _ in known if session in sessions]


def processes(proc: Path = Path("/proc")) -> list[Process]:
    """Every process of the box that has not ended meanwhile."""
    found = []
    for path in proc.glob("[0-9]*"):
        try:
            found.append(
                (int(path.name), os.getsid(int(path.name)), (path / "cmdline").read_bytes())
            )
        except (OSError, ProcessLookupError):
            continue
    return found


def main() -> None:
    """End them and print how many they were."""
    numbers = left_over(processes(), os.getsid(0))
    for number in numbers:
        try:
            os.kill(number, signal.SIGKILL)
        except ProcessLookupError:
            continue
    print(len(numbers))


if __name__ == "__main__":
    main()
