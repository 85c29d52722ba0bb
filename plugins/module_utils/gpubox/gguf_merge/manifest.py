# SPDX-License-Identifier: Apache-2.0
"""The manifest beside a result: what it was made from, and the digests to hold it to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .copy import Reread, stream
from .digest import Ledger, Run
from .files import manifest_path, read_document, write_document
from .plan import Plan
from .progress import Progress, stage

FORMAT = "gpubox.gguf_merge/2"


def write_manifest(
    plan: Plan,
    dest: Path,
    ledger: Ledger | None,
    sha256: Mapping[str, str] | None = None,
    in_place: bool = False,
    origin: str = "",
) -> None:
    """Record what ``dest`` was made from. Written last; without it the next run compares.

    Args:
        ledger: digests of the result; None where its blocks were shared and nothing was read.
        sha256: of the shards, as far as it was checked.
        in_place: the shards are no longer as they were planned with, by our own doing.
        origin: what the caller says that the shards are, see `known_result`.
    """
    merged = dest.stat()
    digests = [None] * len(plan.runs) if ledger is None else ledger.runs
    write_document(
        manifest_path(dest),
        {
            "format": FORMAT,
            "algorithm": None if ledger is None else ledger.algorithm,
            "merged": {
                "name": dest.name,
                "size": merged.st_size,
                "mtime_ns": merged.st_mtime_ns,
                "digest": None if ledger is None else ledger.whole,
            },
            "origin": origin,
            "shared_blocks": plan.shared,
            "tensors": len(plan.tensors),
            "runs": [
                {
                    "source": plan.sources[run.source].path.name,
                    "position": run.position,
                    "length": run.length,
                    "digest": digest,
                }
                for run, digest in zip(plan.runs, digests, strict=True)
            ],
            "sources": [
                {
                    "name": header.path.name,
                    "size": header.size,
                    "mtime_ns": (
                        header.path.stat().st_mtime_ns if in_place else header.identity.mtime_ns
                    ),
                    "inode": header.identity.inode,
                    "sha256": (sha256 or {}).get(header.path.name),
                }
                for header in plan.sources
            ],
        },
    )


def known_result(
    paths: Sequence[Path], dest: Path, shared: bool | None = None, origin: str = ""
) -> int | None:
    """Tensors in ``dest`` if its manifest proves it to be the merger of ``paths``, else None.

    Size and modification time stand for the content, of the result and of the sources. Sources
    that are gone do not matter, unless they would be of another origin.

    Args:
        shared: the layout that it must have: `make_shared_plan`'s or not; None for either.
        origin: what the sources are: two revisions of a model have the same names. Empty for any.
    """
    document = read_document(manifest_path(dest))
    try:
        merged = dest.stat()
        recorded = document["sources"]
        if document["format"] != FORMAT or shared not in (None, document["shared_blocks"]):
            return None
        if (merged.st_size, merged.st_mtime_ns) != (
            document["merged"]["size"],
            document["merged"]["mtime_ns"],
        ):
            return None
        if [source["name"] for source in recorded] != [path.name for path in paths]:
            return None
        for path, source in zip(paths, recorded, strict=True):
            try:
                status = path.stat()
            except FileNotFoundError:
                if origin not in ("", document.get("origin")):
                    return None
                continue
            if (status.st_size, status.st_mtime_ns) != (source["size"], source["mtime_ns"]):
                return None
        return int(document["tensors"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def record_origin(dest: Path, origin: str) -> None:
    """Let the manifest of a known result say what its shards are."""
    document = read_document(manifest_path(dest))
    if origin not in ("", document.get("origin")):
        write_document(manifest_path(dest), {**document, "origin": origin})


def recorded_whole(dest: Path) -> str | None:
    """Digest of the result as its manifest has it."""
    merged = read_document(manifest_path(dest)).get("merged")
    digest = merged.get("digest") if isinstance(merged, dict) else None
    return digest if isinstance(digest, str) and digest else None


def recorded_digest(dest: Path) -> str | None:
    """``ALGORITHM:DIGEST`` of the result as its manifest has it."""
    digest = recorded_whole(dest)
    return f"{read_document(manifest_path(dest)).get('algorithm')}:{digest}" if digest else None


def damage(dest: Path, progress: Progress | None = None) -> list[str] | None:
    """Which parts of a known result are not what the manifest says; None where it tells no digests.

    Reads all of it, past what the page cache holds of it.

    Raises:
        GpuboxError: this machine cannot compute the digest.
    """
    document: dict[str, Any] = read_document(manifest_path(dest))
    try:
        if document["algorithm"] is None:
            return None
        runs = [
            Run(n, int(run["position"]), int(run["length"]))
            for n, run in enumerate(document["runs"])
        ]
        told = [(str(run["source"]), run["digest"]) for run in document["runs"]]
        whole = document["merged"]["digest"]
    except (ValueError, KeyError, TypeError, OverflowError):  # not as we wrote it
        return None
    ledger = reread(dest, dest.stat().st_size, runs, document["algorithm"], progress)
    wrong = [
        f"the tensors of {source} ({run.length} bytes at byte {run.position})"
        for run, (source, wanted), digest in zip(runs, told, ledger.runs, strict=True)
        if digest != wanted
    ]
    if not wrong and ledger.whole != whole:
        wrong = ["the header or the padding"]
    return wrong


def reread(
    path: Path,
    size: int,
    runs: Sequence[Run],
    algorithm: str,
    progress: Progress | None = None,
    what: str = "verifying",
) -> Ledger:
    """Digests of the first ``size`` bytes of a file, from the disk."""
    ledger = Ledger(runs, algorithm)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stream(Reread(descriptor), 0, size, ledger, progress=stage(progress, what, size))
    finally:
        os.close(descriptor)
    return ledger
