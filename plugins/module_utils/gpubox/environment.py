# SPDX-License-Identifier: Apache-2.0
"""What a Python environment holds, compared with the pins it should hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import GpuboxError

# name==version, optionally followed by a line continuation (pip's requirements file format)
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)\s*\\?$")


def normalize(name: str) -> str:
    """Distribution name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def blocks(requirements: str) -> dict[str, str]:
    """Requirement text of each pinned distribution (normalised name to its lines, hashes included).

    Raises:
        GpuboxError: a line is neither an exact pin, a hash of the pin above it nor a comment.
    """
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(requirements.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if stripped.startswith("--hash=") and current is not None:
            current.append(line)
            continue
        match = _PIN.match(stripped)
        if match is None:
            raise GpuboxError(
                f"line {number} of the requirements reads {stripped!r}",
                "exact pins (name==version) and hashes only",
                "compile the requirements again with uv pip compile",
            )
        current = found.setdefault(normalize(match["name"]), [])
        current.append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def pins(requirements: str) -> dict[str, str]:
    """Normalised name to version of each pin."""
    versions = {}
    for name, text in blocks(requirements).items():
        match = _PIN.match(text.splitlines()[0].strip())
        assert match is not None  # noqa: S101 - blocks() only keeps lines that match
        versions[name] = match["version"]
    return versions


def select(requirements: str, names: Iterable[str]) -> str:
    """The requirement text of ``names`` only.

    Raises:
        GpuboxError: a name is not pinned.
    """
    available = blocks(requirements)
    wanted = [normalize(name) for name in names]
    missing = sorted(set(wanted) - set(available))
    if missing:
        raise GpuboxError(
            f"no pin for {', '.join(missing)}", "a pin for each of them", "add it to the stack"
        )
    return "\n".join(available[name] for name in wanted) + "\n"


def installed(site_packages: Path) -> dict[str, str]:
    """Normalised name to version of the distributions in a directory, from its ``.dist-info``."""
    found = {}
    for path in site_packages.glob("*.dist-info"):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        if name and (path / "METADATA").is_file():
            found[normalize(name)] = version
    return found


def difference(wanted: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str]:
    """What is wrong with ``present``: name to a phrase such as ``absent, wanted 1.2``."""
    return {
        name: f"{present.get(name, 'absent')}, wanted {version}"
        for name, version in sorted(wanted.items())
        if present.get(name) != version
    }
