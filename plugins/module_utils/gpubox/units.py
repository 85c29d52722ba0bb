# SPDX-License-Identifier: Apache-2.0
"""What systemd and /proc say of a unit."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def unit_properties(text: str) -> dict[str, str]:
    """Parse ``systemctl show`` output (``Name=value`` a line)."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: value for name, _, value in pairs}


def process_environment(root: Path, pid: int, names: Collection[str]) -> dict[str, str]:
    """The variables ``names`` of process ``pid``; empty when it is gone or not readable."""
    if pid <= 0:
        return {}
    try:
        raw = (root / "proc" / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    found = {}
    for entry in raw.split(b"\0"):
        name, separator, value = entry.decode("utf-8", "replace").partition("=")
        if separator and name in names:
            found[name] = value
    return found
