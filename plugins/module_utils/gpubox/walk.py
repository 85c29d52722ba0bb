# SPDX-License-Identifier: Apache-2.0
"""Whether the service user gets to a file, asked of the kernel as that user."""

from __future__ import annotations

import json
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# what the unit cannot see, because of its ProtectHome=
HIDDEN = ("/home", "/root", "/run/user")
NOBODY = 65534  # stands for a user who is made later, in no group of others
_MOST_LINKS = 40  # the kernel's own limit (path_resolution(7))


def status_of(path: Path) -> os.stat_result | None:
    """What lies there, through links; None when nothing does or it cannot be looked at."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def is_file(path: Path) -> bool:
    """Like ``Path.is_file``, which raises for a name too long and where access is denied."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_directory(path: Path) -> bool:
    """Like ``Path.is_dir``, and never raises either."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def sizes(folder: Path) -> dict[str, int]:
    """Name to bytes of the files in a folder; empty when it cannot be read."""
    try:
        paths = list(folder.iterdir())
    except (OSError, ValueError):
        return {}
    found = {path.name: status_of(path) for path in paths}
    return {name: one.st_size for name, one in found.items() if one and stat.S_ISREG(one.st_mode)}


def unreachable(paths: Iterable[Path]) -> dict[str, str]:
    """Why a path cannot even be looked at, by path; what is only not there is not in it."""
    found = {}
    for path in paths:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            found[str(path)] = error.strerror or str(error)
        except ValueError as error:
            found[str(path)] = str(error)
    return found


def _link(path: Path) -> Path | None:
    """Where a link leads, None for what is none.

    Raises:
        OSError: there is nothing, or it cannot be looked at.
    """
    return path.readlink() if stat.S_ISLNK(path.lstat().st_mode) else None


def components(path: Path) -> list[Path]:
    """Every folder on the way to a path and what it is in the end, through all links.

    What is not there, or cannot be looked at, ends the list.
    """
    found, current, links = [Path("/")], Path("/"), 0
    left = deque(path.parts[1:])
    while left:
        part = left.popleft()
        if part == "..":
            current = current.parent
            continue
        one = current / part
        try:
            target = _link(one)
        except (OSError, ValueError):
            return found
        if target is not None:
            links += 1
            if links > _MOST_LINKS:
                return found
            if target.is_absolute():
                current = Path("/")
            left.extendleft(reversed([part for part in target.parts if part != "/"]))
            continue
        current = one
        if one not in found:
            found.append(one)
    return found


@dataclass(frozen=True)
class Account:
    """Who asks."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def account_of(name: str) -> Account:
    """The user as the system knows him; somebody without rights when there is none yet."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return Account(NOBODY, NOBODY)
    return Account(entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(name, entry.pw_gid)))


def _denied(steps: Iterable[Path], last: int) -> str | None:
    """The first step that this process may not take; ``last`` is asked of a file at the end."""
    for step in steps:
        if not os.access(step, os.X_OK if is_directory(step) else last):
            return str(step)
    return None


def first_denied(paths: Mapping[Path, int], account: Account) -> dict[str, str] | None:
    """Where the account is stopped on its way, by path; a path that it reaches is not in it.

    Args:
        paths: paths and what is asked of a file at their end, ``os.R_OK`` or ``os.X_OK``.
        account: who asks.

    Returns:
        None when it cannot be asked: only root may become somebody else.
    """
    steps = {path: components(path) for path in paths}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # nothing but system calls until the end of the process
        try:
            os.setgroups(account.groups)
            os.setgid(account.gid)
            os.setuid(account.uid)
            found = {str(path): _denied(steps[path], asked) for path, asked in paths.items()}
            os.write(writer, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return {path: where for path, where in answer.items() if where is not None}


def described(path: Path) -> str:
    """A path with its owner and mode, such as ``/root (mode 0700, owner 0:0)``."""
    status = status_of(path)
    if status is None:
        return str(path)
    owner = f"{status.st_uid}:{status.st_gid}"
    return f"{path} (mode {stat.S_IMODE(status.st_mode):04o}, owner {owner})"


def hidden(path: Path) -> str | None:
    """The folder that hides a path from the unit, None when it sees it."""
    for step in components(path):
        for one in HIDDEN:
            if str(step) == one or str(step).startswith(f"{one}/"):
                return one
    return None
