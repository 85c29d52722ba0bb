# SPDX-License-Identifier: Apache-2.0
"""Digests and directories of environments and releases.

A directory whose name is the digest of everything that went into it is either complete (its stamp
exists, written last) or rubbish of an interrupted run that may be removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

DIGEST_LENGTH = 16  # hexadecimal digits: 64 bits, no collision among the few releases of a box


def digest(parts: object) -> str:
    """Digest of any JSON-like value, independent of the order of mapping keys."""
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:DIGEST_LENGTH]


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write ``text`` so that ``path`` holds either its old or its new content after any crash."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_files(directory: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Contents of those of ``names`` that exist in ``directory``."""
    found = {}
    for name in names:
        path = directory / name
        if path.is_file():
            found[name] = path.read_text(encoding="utf-8")
    return found


def publish(directory: Path, files: Mapping[str, str]) -> None:
    """Make ``directory`` hold exactly ``files`` (name to text), through a rename.

    An existing directory is only ever replaced as a whole.
    """
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        staging.chmod(0o755)
        for name, text in sorted(files.items()):
            target = staging / name
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_atomically(target, text)
        if directory.exists():
            shutil.rmtree(directory)
        staging.rename(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
