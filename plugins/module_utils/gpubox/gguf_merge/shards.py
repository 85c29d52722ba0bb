# SPDX-License-Identifier: Apache-2.0
"""The set of shards: its names, its headers, and everything that is wrong with it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import GpuboxError
from ..gguf import (
    DEFAULT_ALIGNMENT,
    KEY_ARCHITECTURE,
    KEY_QUANTIZATION_VERSION,
    KEY_SPLIT_COUNT,
    KEY_SPLIT_NO,
    KEY_SPLIT_TENSORS_COUNT,
    Header,
    read_header,
)
from .system import each, forget

SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
FAULTS_SHOWN = 40  # of a set that is wrong all over


def shard_paths(src: Path) -> list[Path]:
    """All shards of the set that ``src`` belongs to, in order; ``src`` alone when it is no shard.

    The name alone decides (``PREFIX-NNNNN-of-NNNNN.gguf``, numbered from 1, ggml docs/gguf.md):
    the folder is not searched, so neither a foreign nor a missing file can change the set.

    Raises:
        GpuboxError: the number in the name is outside the set.
    """
    match = SHARD_NAME.fullmatch(src.name)
    if match is None:
        return [src]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise GpuboxError(
            f"{src}: shard {number} of {count}",
            f"a number from 1 to {count}",
            "Correct the name; shards are numbered from 1.",
        )
    return [
        src.with_name(f"{match['prefix']}-{index:05d}-of-{count:05d}.gguf")
        for index in range(1, count + 1)
    ]


def combined(faults: Sequence[GpuboxError], wanted: str) -> GpuboxError:
    """One error that lists all ``faults``, each with what was expected, and every remedy once."""
    if len(faults) == 1:
        return faults[0]
    lines = [f"{fault.measured}; expected: {fault.wanted}" for fault in faults[:FAULTS_SHOWN]]
    if len(faults) > FAULTS_SHOWN:
        lines.append(f"… and {len(faults) - FAULTS_SHOWN} more")
    remedies = dict.fromkeys(fault.remedy for fault in faults[:FAULTS_SHOWN])
    return GpuboxError(
        f"{len(faults)} faults\n  " + "\n  ".join(lines), wanted, "\n  ".join(remedies)
    )


def read_set(paths: Sequence[Path]) -> tuple[list[Header], list[GpuboxError]]:
    """Headers of all readable files, and every fault of each file and of the set as a whole."""
    headers: list[Header | None] = []
    faults: list[GpuboxError] = []
    for path in paths:
        try:
            headers.append(read_header(path))
        except GpuboxError as error:
            headers.append(None)
            faults.append(error)
    present = [header for header in headers if header is not None]
    if headers[0] is not None and len(paths) == 1 and is_whole(headers[0]):
        faults += _whole_file_faults(headers[0])
        return present, faults
    for index, header in enumerate(headers):
        if header is not None:
            faults += _split_faults(header, index, len(paths))
    faults += _kinship_faults(present)
    faults += _duplicates(present)
    if len(present) == len(paths):
        faults += _tensor_count_faults(present)
    # without the first shard its alignment, which the others may lack, is unknown
    if headers[0] is not None:
        for header in present:
            fault = header.layout_fault(alignment_of(header, headers[0]))
            if fault is not None:
                faults.append(fault)
    return present, faults


def is_whole(header: Header) -> bool:
    """A file that was never split, or the result of a merge (split.count 0).

    The name -00001-of-00001 without split keys is a hub's convention for a single file.
    """
    entry = header.keys.get(KEY_SPLIT_COUNT)
    return entry is None or entry.integer == 0 or SHARD_NAME.fullmatch(header.path.name) is None


def _whole_file_faults(header: Header) -> list[GpuboxError]:
    faults = []
    entry = header.keys.get(KEY_SPLIT_COUNT)
    if entry is not None and entry.integer != 0:
        number = header.keys.get(KEY_SPLIT_NO)
        part = "?" if number is None or number.integer is None else number.integer + 1
        faults.append(
            GpuboxError(
                f"{header.path}: {KEY_SPLIT_COUNT} says that it is shard {part} of {entry.value}",
                "a file of its own, or a name that ends in -NNNNN-of-NNNNN.gguf",
                "Give the shards the names they were published under; "
                "a file joined with cat is no model.",
            )
        )
    fault = header.layout_fault(alignment_of(header, header))
    return [*faults, fault] if fault is not None else faults


def alignment_of(header: Header, first: Header) -> int:
    """Alignment that the data of ``header`` really has, in bytes.

    Only the first shard of a set holds metadata. Some writers (gguf-py) lay the others out with the
    first one's alignment, some (llama-gguf-split) with 32: the length of the file tells which.
    """
    if header.own_alignment is not None:
        return header.own_alignment
    inherited = first.own_alignment or DEFAULT_ALIGNMENT
    if header.layout_fault(inherited) is None or header.layout_fault(DEFAULT_ALIGNMENT) is not None:
        return inherited
    return DEFAULT_ALIGNMENT


def _split_faults(header: Header, index: int, count: int) -> list[GpuboxError]:
    """What split.no and split.count say against the name. split.no counts from 0."""
    faults = []
    for key, expected, meaning in (
        (KEY_SPLIT_NO, index, f"its name says shard {index + 1}"),
        (KEY_SPLIT_COUNT, count, f"its name says {count} shards"),
    ):
        entry = header.keys.get(key)
        found = "no" if entry is None else f"{entry.value!r} as"
        if entry is None or entry.integer != expected:
            faults.append(
                GpuboxError(
                    f"{header.path}: {found} {key}",
                    f"{expected} ({meaning})",
                    "Give each shard the name it was published under, or fetch the set again.",
                )
            )
    return faults


def _kinship_faults(headers: Sequence[Header]) -> list[GpuboxError]:
    """Shards that say another architecture or quantisation version than the first one that does."""
    faults = []
    for key in (KEY_ARCHITECTURE, KEY_QUANTIZATION_VERSION):
        told = [(header, header.keys[key].value) for header in headers if key in header.keys]
        for header, value in told[1:]:
            if value != told[0][1]:
                faults.append(
                    GpuboxError(
                        f"{header.path}: {key} is {value!r}",
                        f"{told[0][1]!r}, as in {told[0][0].path.name}",
                        "This shard is of another model or revision; fetch the set again.",
                    )
                )
    return faults


def _duplicates(headers: Sequence[Header]) -> list[GpuboxError]:
    home: dict[str, Path] = {}
    faults = []
    for header in headers:
        for tensor in header.tensors:
            first = home.setdefault(tensor.name, header.path)
            if first != header.path:
                faults.append(
                    GpuboxError(
                        f"{header.path}: tensor {tensor.name} is in {first.name} too",
                        "each tensor in one shard",
                        "One of the two is of another set; fetch the set again.",
                    )
                )
    return faults


def _tensor_count_faults(headers: Sequence[Header]) -> list[GpuboxError]:
    """split.tensors.count is the total of the set, in every shard."""
    total = sum(len(header.tensors) for header in headers)
    faults = []
    for header in headers:
        entry = header.keys.get(KEY_SPLIT_TENSORS_COUNT)
        if entry is not None and entry.integer != total:
            faults.append(
                GpuboxError(
                    f"{header.path}: {KEY_SPLIT_TENSORS_COUNT} is {entry.value!r}",
                    f"{total}, the tensors of all {len(headers)} shards",
                    "A shard is of another revision or was renumbered; fetch the set again.",
                )
            )
    return faults


def foreign_faults(
    headers: Sequence[Header],
    sha256: Mapping[str, str],
    progress: Callable[[int, int], None] | None = None,
) -> list[GpuboxError]:
    """Shards that are not what the publisher's list says, or that it lacks.

    A shard of another revision with the same counts can be told by nothing else. Reads every byte.

    Args:
        sha256: name to hexadecimal digest; names of other files do not matter.
        progress: called with bytes done and bytes in all, after each shard.
    """
    with ThreadPoolExecutor(min(len(headers), os.cpu_count() or 1)) as pool:
        found = each(pool, _sha256, (header.path for header in headers))
        faults, done, total = [], 0, sum(header.size for header in headers)
        for header, digest in zip(headers, found, strict=True):
            expected = sha256.get(header.path.name)
            if expected is None:
                faults.append(
                    GpuboxError(
                        f"{header.path}: its sha256 is not in the list",
                        "the sha256 of every shard",
                        "Complete the list from the model's publisher, or give none.",
                    )
                )
            elif digest != expected.lower():
                faults.append(
                    GpuboxError(
                        f"{header.path}: sha256 {digest}",
                        expected.lower(),
                        "This shard is damaged or of another model or revision; fetch it again.",
                    )
                )
            done += header.size
            if progress is not None:
                progress(done, total)
    return faults


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as stream:
        digest = hashlib.file_digest(stream, "sha256")
        forget(stream.fileno())
    return digest.hexdigest()
