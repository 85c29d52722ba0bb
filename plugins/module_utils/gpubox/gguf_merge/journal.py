# SPDX-License-Identifier: Apache-2.0
"""Remembers how far an unfinished result is right, so that a killed merge goes on.

Written after the data is on the disk. What it says is believed only for the same plan and the same
shards, and only after the bytes were read again and have the digest that it holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from ..gguf import Header
from .files import journal_path, read_document, write_document
from .plan import Plan

FORMAT = "gpubox.gguf_merge.journal/1"


@dataclass(frozen=True)
class Journal:
    """The state of an unfinished result.

    ``token`` names this merge. A merge in place writes it on every shard before the first journal:
    a shard without it is another file. It says so there too before it takes content away, so that
    a shard cannot be taken for whole when the journal is lost.
    """

    binding: str
    token: str
    in_place: bool
    algorithm: str
    position: int = 0  # bytes of the result that are on the disk
    digest: str = ""  # of these bytes

    def write(self, dest: Path) -> None:
        """Keep it; it is on the disk when this returns."""
        write_document(journal_path(dest), {"format": FORMAT, **asdict(self)})


def read_journal(dest: Path) -> Journal | None:
    """The journal of an earlier run, if it is one that we understand."""
    document = read_document(journal_path(dest))
    if document.pop("format", None) != FORMAT:
        return None
    try:
        journal = Journal(**document)
    except TypeError:
        return None
    return journal if isinstance(journal.position, int) and journal.position >= 0 else None


def takes_from_shards(dest: Path) -> bool:
    """Whether an unfinished merge in place to ``dest`` has content that its shards lack."""
    journal = read_journal(dest)
    return journal is not None and journal.in_place and journal.position > 0


def begin(plan: Plan, in_place: bool, algorithm: str) -> Journal:
    """A journal of nothing yet."""
    return Journal(binding(plan, in_place), secrets.token_hex(16), in_place, algorithm)


def binding(plan: Plan, in_place: bool) -> str:
    """What ties a journal to a plan: the layout and the identity of every shard.

    A merge in place changes the time of its shards; there the bytes of the headers, which it leaves
    alone, stand for it. The device is left out: its number may change with the next boot.
    """
    sources = [
        [
            header.path.name,
            header.identity.inode,
            header.size,
            _header_digest(header) if in_place else header.identity.mtime_ns,
        ]
        for header in plan.sources
    ]
    document = json.dumps([FORMAT, plan.size, plan.header_size, in_place, sources])
    return hashlib.sha256(document.encode("utf-8", "surrogateescape")).hexdigest()


def _header_digest(header: Header) -> str:
    with header.path.open("rb") as stream:
        data = os.pread(stream.fileno(), header.end, 0)
    return hashlib.sha256(data).hexdigest()
