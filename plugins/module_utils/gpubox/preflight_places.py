# SPDX-License-Identifier: Apache-2.0
"""File systems and the way to them: findings from the fact ``paths``, before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .gguf_merge import reserve
from .preflight import GIB, RESERVE_BYTES, Finding
from .walk import described

MIB = 1024**2
# Two ranks have served in 1 GiB here (demo/box.py); with the 64 MiB that container engines give
# when nobody asks, NCCL stops (NCCL's user guide, "Shared memory").
SHARED_ENOUGH = GIB
SHARED_TOO_LITTLE = 64 * MIB

Places = Mapping[str, Mapping[str, Any]]


def check_space(needs: Iterable[tuple[str, str, int]], places: Places) -> list[Finding]:
    """Bytes that will be written, summed where they lie on one file system, against its free ones.

    Args:
        needs: purpose, path and bytes.
        places: the fact ``paths``.
    """
    found = []
    systems: dict[str, list[tuple[str, str, int]]] = {}
    free: dict[str, tuple[int, str]] = {}
    for purpose, path, size in needs:
        place = places.get(path) or {}
        if not size:
            continue
        if place.get("free_bytes") is None:
            found.append(
                Finding(
                    "warning",
                    "space",
                    f"the free space for {path} is unknown",
                    f"{size / GIB:.1f} GiB for the {purpose}",
                    f"look with `df {path}`",
                )
            )
            continue
        # volumes of one file system share its number
        key = str(place.get("number") or place["mount"])
        systems.setdefault(key, []).append((purpose, path, size))
        free[key] = (int(place["free_bytes"]), str(place["mount"]))
    for key, wanted in systems.items():
        size_of_all = sum(size for *_, size in wanted)
        kept = max(RESERVE_BYTES, reserve(size_of_all))  # what the merge asks for too
        total = size_of_all + kept
        left, mount = free[key]
        if left < total:
            parts = ", ".join(
                f"{size / GIB:.1f} for the {what} ({at})" for what, at, size in wanted
            )
            found.append(
                Finding(
                    "error",
                    "space",
                    f"{left / GIB:.1f} GiB free on {mount}",
                    f"{total / GIB:.1f} GiB: {parts}, {kept / GIB:.1f} in reserve",
                    "free space there, or move one of them to another file system",
                )
            )
    return found


def check_reach(faults: Mapping[str, str]) -> list[Finding]:
    """Paths that cannot even be looked at.

    Args:
        faults: path to what the system says.
    """
    return [
        Finding(
            "error",
            "path",
            f"{path}: {reason}",
            "a path that root can look at, whether there is something or not",
            f"look with `ls -ld {path}`, and correct the variable or the file system",
        )
        for path, reason in sorted(faults.items())
    ]


def check_mounts(uses: Iterable[tuple[str, str]], places: Places) -> list[Finding]:
    """What is loaded as code does not lie on noexec, and what is written not on a read-only one.

    Args:
        uses: path and use: ``runs`` (written and executed) or ``written``.
        places: the fact ``paths``.
    """
    found = []
    for path, use in uses:
        place = places.get(path) or {}
        wrong = [
            word
            for word, bad in (
                ("read-only", place.get("read_only")),
                ("noexec", place.get("noexec") and use == "runs"),
            )
            if bad
        ]
        if wrong:
            options = "rw" if wrong == ["read-only"] else "rw,exec"
            found.append(
                Finding(
                    "error",
                    "mount",
                    f"{path} lies on {place['mount']}, which is mounted {' and '.join(wrong)}",
                    "a file system that can be written"
                    + (" and whose compiled kernels can be loaded" if use == "runs" else ""),
                    f"mount -o remount,{options} {place['mount']} (and correct /etc/fstab)",
                )
            )
    return found


def check_shared_memory(ranks: int, places: Places) -> list[Finding]:
    """Ranks talk through /dev/shm."""
    size = (places.get("/dev/shm") or {}).get("size_bytes")  # noqa: S108 - the place is the point
    if ranks < 2 or size is None or size >= SHARED_ENOUGH:
        return []
    return [
        Finding(
            "error" if size <= SHARED_TOO_LITTLE else "warning",
            "memory",
            f"/dev/shm has {size / MIB:.0f} MiB",  # noqa: S108
            f"{SHARED_ENOUGH // MIB} MiB or more: {ranks} ranks talk through it",
            "mount -o remount,size=50% /dev/shm, or give the container --shm-size",
        )
    ]


def check_walk(
    user: str, denied: Mapping[str, str] | None, hidden: Mapping[str, str]
) -> list[Finding]:
    """The service user gets to what it runs and reads (field report U3).

    Args:
        user: the service user.
        denied: path to the component at which the user is stopped; None when nobody could ask.
        hidden: path to the folder that the unit's own protection hides.
    """
    found = []
    if denied is None:
        found.append(
            Finding(
                "warning",
                "user",
                f"the way to the interpreter and the model could not be tried as user {user}",
                "to know that the service user can go it",
                "run as root (become)",
            )
        )
    for path, where in sorted((denied or {}).items()):
        found.append(
            Finding(
                "error",
                "user",
                f"user {user} is stopped at {described(Path(where))} on the way to {path}",
                "a way that the service user can go, and a file that it can use",
                "chmod o+rx each folder of the way (a file o+r), or move it and set "
                "python_env_root or gguf_model_dir",
            )
        )
    for path, where in sorted(hidden.items()):
        found.append(
            Finding(
                "error",
                "user",
                f"{path} lies below {where}, which the unit hides (ProtectHome)",
                "a place that the unit sees",
                "move it and set python_env_root or gguf_model_dir",
            )
        )
    return found
