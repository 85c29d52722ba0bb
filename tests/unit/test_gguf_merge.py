# SPDX-License-Identifier: Apache-2.0
"""The merger: identical to llama-gguf-split's, refused where that one is silently wrong."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gpubox.errors import GpuboxError
from gpubox.gguf import read_header
from gpubox.gguf_merge import (
    Options,
    command,
    copy,
    destination,
    digest,
    files,
    merge,
    merging,
    shard_paths,
    system,
)
from gpubox.gguf_merge.files import journal_path, manifest_path, partial_path
from gpubox.gguf_merge.shards import alignment_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demo.tiny_glm5.writer import write as write_tiny
from tests.unit.gguf_files import (
    I32,
    METADATA,
    STRING,
    TENSORS,
    TYPE_F32,
    TYPE_Q4_K,
    TYPE_Q8_0,
    U16,
    U32,
    GgufFile,
    ShardSet,
    TensorData,
    shard_set,
)
from tests.unit.gguf_mutations import mutated
from tests.unit.timing import AT_ONCE

ROOT = Path(__file__).resolve().parents[2]

# sha256 of what `llama-gguf-split --merge` made of the set that `python -m demo.tiny_glm5 OUT`
# writes, and of the one with --metadata-shard (same metadata and tensors, so the same file).
# Recorded 2026-11-30 with the tool built from the llama.cpp copy inside the source package of
# llama-cpp-python 0.3.36 (version 0.5.0-dev, commit 0c1e570); repeat it with LLAMA_GGUF_SPLIT.
TOOL_SHA256 = "5d2b3597d52546e5457f0797b6ab835079fed8f00dea718517fe1c38b2fd9581"


@pytest.fixture
def good(tmp_path: Path) -> ShardSet:
    return shard_set(tmp_path / "shards")


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "Model-Q4.gguf"


def refusal(src: Path, dest: Path) -> str:
    """Text of the refusal, after which the target folder and the sources are as they were."""
    before = {path: path.stat().st_mtime_ns for path in dest.parent.iterdir()}
    sources = snapshot(src.parent)
    with pytest.raises(GpuboxError) as caught:
        merge(src, dest)
    assert {path: path.stat().st_mtime_ns for path in dest.parent.iterdir()} == before
    assert snapshot(src.parent) == sources
    return str(caught.value)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# ------------------------------------------------------------------------------ right results


@pytest.mark.parametrize("cuts", [(3, 5), (0,), (0, 4), (1, 2, 3, 4, 5, 6), ()])
@pytest.mark.parametrize("version", [2, 3])
def test_the_result_is_what_the_rules_say(
    tmp_path: Path, dest: Path, cuts: tuple[int, ...], version: int
) -> None:
    shards = shard_set(tmp_path / "shards", cuts, version=version)
    result = merge(shards.paths[-1], dest)
    assert result.action == "merged"
    assert (result.size, result.tensors) == (dest.stat().st_size, len(TENSORS))
    assert dest.read_bytes() == shards.merged


def test_gguf_py_reads_every_tensor_and_key_unchanged(good: ShardSet, dest: Path) -> None:
    merge(good.paths[0], dest)
    merged = gguf.GGUFReader(dest)
    expected = [t for path in good.paths for t in gguf.GGUFReader(path).tensors]
    assert [t.name for t in merged.tensors] == [t.name for t in expected]
    for ours, theirs in zip(merged.tensors, expected, strict=True):
        assert ours.tensor_type == theirs.tensor_type
        assert np.array_equal(np.asarray(ours.data).ravel(), np.asarray(theirs.data).ravel())
    fields = [name for name in merged.fields if not name.startswith("GGUF.")]
    assert fields == [*(key for key, *_ in METADATA), "split.no", "split.tensors.count",
                      "split.count"]  # fmt: skip
    assert merged.fields["split.count"].contents() == 0
    assert merged.fields["tiny.tokens"].contents() == ["a", "", "ä€", "z" * 300]


@pytest.mark.parametrize("metadata_shard", [False, True])
def test_the_tiny_glm5_merges_to_the_bytes_of_the_real_tool(
    tmp_path: Path, dest: Path, metadata_shard: bool
) -> None:
    write_tiny(tmp_path / "shards", metadata_shard=metadata_shard)
    merge(next((tmp_path / "shards").glob("*-00002-of-*.gguf")), dest)
    assert hashlib.sha256(dest.read_bytes()).hexdigest() == TOOL_SHA256


def real_tool() -> str:
    tool = os.environ.get("LLAMA_GGUF_SPLIT")
    if not tool:
        pytest.skip("LLAMA_GGUF_SPLIT does not name the real tool")
    return tool


@pytest.mark.parametrize("kind", ["tiny", "tiny-metadata", "plain", "metadata", "one", "version-2"])
def test_the_real_tool_agrees(tmp_path: Path, dest: Path, kind: str) -> None:
    tool = real_tool()
    folder = tmp_path / "shards"
    if kind.startswith("tiny"):
        write_tiny(folder, metadata_shard=kind == "tiny-metadata")
    else:
        cuts = {"metadata": (0, 4), "one": ()}.get(kind, (3, 5))
        shard_set(folder, cuts, version=2 if kind == "version-2" else 3, pad_byte=b"\xaa")
    first = min(folder.glob("*.gguf"))
    theirs = tmp_path / "theirs.gguf"
    subprocess.run([tool, "--merge", first, theirs], check=True, capture_output=True)
    merge(first, dest)
    assert dest.read_bytes() == theirs.read_bytes()
    if kind == "tiny":
        command = [tool, "--split", "--split-max-tensors", "32", dest, tmp_path / "again"]
        subprocess.run(command, check=True, capture_output=True)
        for path in sorted(folder.glob("*.gguf")):
            again = tmp_path / f"again{path.name[-20:]}"
            assert again.read_bytes() == path.read_bytes()


def test_padding_of_the_sources_is_not_copied(tmp_path: Path, dest: Path) -> None:
    shards = shard_set(tmp_path / "shards", pad_byte=b"\xaa", pad_end=False)
    merge(shards.paths[0], dest)
    assert dest.read_bytes() == shards.merged


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
@pytest.mark.parametrize("inherited", [True, False])
def test_the_alignment_of_the_first_shard_is_kept(
    tmp_path: Path, dest: Path, alignment: int, inherited: bool
) -> None:
    """gguf-py lays all shards out with the first one's alignment, llama-gguf-split with 32."""
    metadata = (*METADATA, ("general.alignment", U32, alignment))
    shards = shard_set(tmp_path / "shards", metadata=metadata, alignment=alignment)
    if not inherited:
        for number in (2, 3):
            shards.shards[number - 1] = replace(shards.shards[number - 1], alignment=32)
        shards.write()
    merge(shards.paths[0], dest)
    assert dest.read_bytes() == shards.merged
    for tensor, expected in zip(gguf.GGUFReader(dest).tensors, TENSORS, strict=True):
        assert np.asarray(tensor.data).tobytes() == expected.data


def test_gaps_between_tensors_are_closed(tmp_path: Path, dest: Path) -> None:
    """gguf-py accepts gaps, llama.cpp refuses them: the result has none."""
    shards = shard_set(tmp_path / "shards")
    shard = shards.shards[1]
    content = shard.to_bytes()
    header, data = shard.header(), content[len(shard.header()) + -len(shard.header()) % 32 :]
    moved = header[:-8] + int.to_bytes(int.from_bytes(header[-8:], "little") + 64, 8, "little")
    offset = int.from_bytes(header[-8:], "little")
    shards.path(2).write_bytes(
        moved + bytes(-len(moved) % 32) + data[:offset] + b"\xaa" * 64 + data[offset:]
    )
    merge(shards.paths[0], dest)
    assert dest.read_bytes() == shards.merged


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
dimensions = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_valid_set_merges_to_what_gguf_py_reads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensors = []
    for name in data.draw(st.lists(names, min_size=1, max_size=8, unique=True)):
        kind = data.draw(st.sampled_from([TYPE_F32, TYPE_Q8_0, TYPE_Q4_K]))
        first, *rest = data.draw(dimensions)
        tensors.append(TensorData(name, (first * kind[1], *rest), kind))
    cuts = tuple(
        sorted(data.draw(st.sets(st.integers(1, max(1, len(tensors) - 1)), max_size=3)))
        if len(tensors) > 1
        else ()
    )
    folder = tmp_path_factory.mktemp("any")
    shards = shard_set(folder / "shards", cuts, tuple(tensors))
    dest = folder / "merged.gguf"
    merge(data.draw(st.sampled_from(shards.paths)), dest)
    assert dest.read_bytes() == shards.merged
    read = gguf.GGUFReader(dest).tensors
    assert [(t.name, np.asarray(t.data).tobytes()) for t in read] == [
        (t.name, t.data) for t in tensors
    ]


# ------------------------------------------------------------------------------ the set


def test_the_set_follows_from_the_name_alone(good: ShardSet, dest: Path) -> None:
    assert shard_paths(good.paths[2]) == good.paths
    (good.folder / "Model-Q4-00004-of-00003.gguf").write_bytes(b"left over")
    (good.folder / "Model-Q4-00001-of-00002.gguf").write_bytes(b"of another division")
    merge(good.paths[1], dest)
    assert dest.read_bytes() == good.merged


def test_symbolic_links_of_a_hub_cache_are_shards(
    tmp_path: Path, good: ShardSet, dest: Path
) -> None:
    (tmp_path / "snapshot").mkdir()
    for index, path in enumerate(good.paths):
        blob = tmp_path / f"blob{index}"
        path.rename(blob)
        (tmp_path / "snapshot" / path.name).symlink_to(blob)
    merge(tmp_path / "snapshot" / good.paths[0].name, dest)
    assert dest.read_bytes() == good.merged


@pytest.mark.parametrize("name", ["M-00000-of-00003.gguf", "M-00004-of-00003.gguf"])
def test_numbers_outside_the_set_are_refused(tmp_path: Path, dest: Path, name: str) -> None:
    assert "numbered from 1" in refusal(tmp_path / name, dest)


def spoil(shards: ShardSet, how: str) -> None:
    """Make the set wrong in one way; shard 2 is the one to blame unless the set is."""
    second = shards.paths[1]
    content = second.read_bytes()
    if how == "missing":
        second.unlink()
    elif how == "truncated":
        second.write_bytes(content[:-100])
    elif how == "header-only":
        second.write_bytes(content[:80])
    elif how == "empty":
        second.write_bytes(b"")
    elif how == "zeros":
        second.write_bytes(bytes(len(content)))
    elif how == "html":
        second.write_bytes(b"<!doctype html><html></html>")
    elif how == "lfs":
        second.write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 5\n")
    elif how == "concatenated":
        second.write_bytes(content + shards.paths[2].read_bytes())
    elif how == "longer":
        second.write_bytes(content + b"trailing bytes of nobody, more than padding")
    elif how == "swapped":
        other = shards.paths[2].read_bytes()
        shards.paths[2].write_bytes(content)
        second.write_bytes(other)
    elif how == "split.no":
        shards.change(2, ("split.no", U16, 2))
    elif how == "split.count":
        shards.change(2, ("split.count", U16, 2))
    elif how == "split.tensors.count":
        shards.change(2, ("split.tensors.count", I32, 8))
    elif how == "no-split-keys":
        second.write_bytes(shards.shards[1].without_key("split.count").to_bytes())
    elif how == "duplicate":
        extra = replace(shards.shards[1], tensors=(TENSORS[0], *shards.shards[1].tensors[1:]))
        second.write_bytes(extra.to_bytes())
    elif how == "architecture":
        shards.change(2, ("general.architecture", STRING, "llama"))
    elif how == "quantization-version":
        shards.change(2, ("general.quantization_version", U32, 1))
    elif how == "alignment":
        shards.change(2, ("general.alignment", U32, 48))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "missing"),
        ("truncated", "truncated"),
        ("header-only", "truncated"),
        ("empty", "empty"),
        ("zeros", "zero bytes"),
        ("html", "HTML"),
        ("lfs", "LFS pointer"),
        ("concatenated", "concatenated"),
        ("longer", "more than the header describes"),
        ("swapped", "split.no; expected: 1"),
        ("split.no", "2 as split.no"),
        ("split.count", "2 as split.count"),
        ("split.tensors.count", "split.tensors.count is 8"),
        ("no-split-keys", "no split.count"),
        ("duplicate", "tensor output.weight is in Model-Q4-00001-of-00003.gguf too"),
        ("architecture", "general.architecture is 'llama'"),
        ("quantization-version", "general.quantization_version is 1"),
        ("alignment", "general.alignment is 48"),
    ],
)
def test_a_wrong_set_is_refused_by_name(good: ShardSet, dest: Path, how: str, words: str) -> None:
    spoil(good, how)
    text = refusal(good.path(1), dest)
    assert words in text.replace("\nwanted: ", "; expected: ")
    assert good.path(2).name in text


def test_a_lost_last_shard_is_noticed_when_the_counts_were_patched_down(
    tmp_path: Path, dest: Path
) -> None:
    shards = shard_set(tmp_path / "shards")
    for number in (1, 2):
        changed = shards.shards[number - 1].with_key(("split.count", U16, 2))
        path = shards.path(number)
        path.unlink()
        path.with_name(f"Model-Q4-{number:05d}-of-00002.gguf").write_bytes(changed.to_bytes())
    text = refusal(tmp_path / "shards" / "Model-Q4-00001-of-00002.gguf", dest)
    assert "split.tensors.count is 7" in text
    assert "5, the tensors of all 2 shards" in text


def test_all_faults_are_told_at_once(good: ShardSet, dest: Path) -> None:
    good.paths[0].write_bytes(b"<html>")
    good.paths[1].unlink()
    good.change(3, ("split.no", U16, 7))
    text = refusal(good.paths[0], dest.with_name("Out-00001-of-00002.gguf"))
    assert "4 faults" in text
    for words in ("HTML page", "missing", "7 as split.no", "named like a shard"):
        assert words in text


def test_thousands_of_faults_stay_readable(tmp_path: Path, dest: Path) -> None:
    text = refusal(tmp_path / "M-00001-of-60000.gguf", dest)
    assert "60000 faults" in text
    assert "59960 more" in text
    assert len(text) < 20_000


def test_a_file_of_its_own_is_copied_and_known_again(tmp_path: Path, dest: Path) -> None:
    src = tmp_path / "whole.gguf"
    src.write_bytes(GgufFile(METADATA, TENSORS, pad_end=False).to_bytes())
    assert merge(src, dest).action == "copied"
    assert dest.read_bytes() == src.read_bytes()
    assert merge(src, dest).action == "unchanged"
    again = merge(src, src)
    assert (again.action, again.path) == ("unchanged", src)
    assert not manifest_path(src).exists()


def test_a_hub_name_of_one_without_split_keys_is_a_file_of_its_own(
    tmp_path: Path, dest: Path
) -> None:
    src = tmp_path / "M-00001-of-00001.gguf"
    src.write_bytes(GgufFile(METADATA, TENSORS).to_bytes())
    assert merge(src, dest).action == "copied"


def test_left_over_split_metadata_is_refused(tmp_path: Path, dest: Path) -> None:
    shards = shard_set(tmp_path / "shards")
    src = tmp_path / "renamed.gguf"
    src.write_bytes(shards.paths[1].read_bytes())
    assert "shard 2 of 3" in refusal(src, dest)
    src.write_bytes(b"".join(path.read_bytes() for path in shards.paths))
    text = refusal(src, dest)
    assert "shard 1 of 3" in text
    assert "concatenated" in text


# ------------------------------------------------------------------------------ destination


def test_an_input_is_never_written_to(good: ShardSet, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.hardlink_to(good.paths[1])
    assert f"is the input {good.paths[1]}" in refusal(good.paths[0], link)
    soft = tmp_path / "soft.gguf"
    soft.symlink_to(good.paths[2])
    assert f"is the input {good.paths[2]}" in refusal(good.paths[0], soft)


def test_unusable_destinations_are_refused(good: ShardSet, tmp_path: Path) -> None:
    assert "a directory" in refusal(good.paths[0], tmp_path)
    with pytest.raises(GpuboxError, match="no such folder"):
        merge(good.paths[0], tmp_path / "none" / "x.gguf")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(good.paths[0], tmp_path / "pipe")
    with pytest.raises(GpuboxError, match="too long"):
        merge(good.paths[0], tmp_path / ("x" * 250))


def test_a_folder_without_permission_is_refused(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination.os, "access", lambda *_: False)  # root may write everywhere
    assert f"not writable for user id {os.geteuid()}" in refusal(good.paths[0], dest)


def test_too_little_space_is_told_before_anything_is_written(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def nearly_full(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[1], values[4] = 1, len(good.merged)  # block size; blocks free for us
        return os.statvfs_result(values)

    monkeypatch.setattr(destination.os, "statvfs", nearly_full)
    text = refusal(good.paths[0], dest)
    needed = len(good.merged) + len(good.merged) // 20
    assert f"{len(good.merged)} bytes free" in text
    assert f"wanted: {needed} bytes" in text
    partial_path(dest).write_bytes(bytes(4096))  # of a killed run: its space will be free
    assert merge(good.paths[0], dest).action == "merged"


def test_a_symbolic_link_as_destination_is_followed(
    good: ShardSet, dest: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(dest)
    assert merge(good.paths[0], link).path == dest
    assert link.is_symlink()
    assert dest.read_bytes() == good.merged
    assert merge(good.paths[0], link).action == "unchanged"


def test_a_replaced_file_hands_on_its_mode(good: ShardSet, dest: Path) -> None:
    dest.write_bytes(bytes(5000))  # what a killed llama-gguf-split leaves
    dest.chmod(0o604)
    merge(good.paths[0], dest)
    assert dest.read_bytes() == good.merged
    assert dest.stat().st_mode & 0o777 == 0o604


# ------------------------------------------------------------------------------ reruns


def test_a_rerun_reads_nothing_and_survives_the_loss_of_the_shards(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(good.paths[0], dest)
    before = identity(dest)
    monkeypatch.setattr(merging, "read_set", lambda paths: pytest.fail(f"{paths} were read"))
    monkeypatch.setattr(merging, "stream", lambda *_: pytest.fail("content was read"))
    result = merge(good.paths[1], dest)
    assert (result.action, result.changed) == ("unchanged", False)
    assert (result.size, result.tensors) == (dest.stat().st_size, len(TENSORS))
    for path in good.paths:
        path.unlink()
    assert merge(good.paths[0], dest).action == "unchanged"
    assert identity(dest) == before


def test_a_new_revision_is_merged_again(good: ShardSet, dest: Path) -> None:
    merge(good.paths[0], dest)
    changed = good.shards[1].to_bytes()[:-1] + b"\x7f"
    good.paths[1].write_bytes(changed.replace(TENSORS[3].data[:8], b"revision"))
    assert merge(good.paths[0], dest).action == "merged"
    assert b"revision" in dest.read_bytes()
    assert merge(good.paths[0], dest).action == "unchanged"


@pytest.mark.parametrize("position", [30, -60])
def test_a_damaged_result_is_made_again(good: ShardSet, dest: Path, position: int) -> None:
    merge(good.paths[0], dest)
    content = bytearray(good.merged)
    content[position] ^= 1
    dest.write_bytes(content)
    assert merge(good.paths[0], dest).action == "merged"
    assert dest.read_bytes() == good.merged


def identity(path: Path) -> tuple[int, int, int]:
    """Which file it is and when it was written; not when it was read."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"format": "other"}', "{}"])
def test_a_right_file_without_a_usable_manifest_is_adopted(
    good: ShardSet, dest: Path, manifest: str | None
) -> None:
    dest.write_bytes(good.merged)
    before = identity(dest)
    if manifest is not None:
        manifest_path(dest).write_text(manifest)
    assert merge(good.paths[0], dest).action == "adopted"
    assert identity(dest) == before
    assert merge(good.paths[0], dest).action == "unchanged"


def test_the_manifest_of_another_program_or_version_proves_nothing(
    good: ShardSet, dest: Path
) -> None:
    merge(good.paths[0], dest)
    document = json.loads(manifest_path(dest).read_text())
    manifest_path(dest).write_text(json.dumps({**document, "format": "gpubox.gguf_merge/1"}))
    assert merge(good.paths[0], dest).action == "adopted"
    assert json.loads(manifest_path(dest).read_text()) == document


def test_the_manifest_of_another_model_proves_nothing(good: ShardSet, dest: Path) -> None:
    merge(good.paths[0], dest)
    with pytest.raises(GpuboxError, match="3 faults"):
        merge(good.folder / "Other-00001-of-00003.gguf", dest)


def test_touched_shards_are_compared_and_nothing_is_rewritten(good: ShardSet, dest: Path) -> None:
    merge(good.paths[0], dest)
    before = identity(dest)
    os.utime(good.paths[2], ns=(1, 1))
    assert merge(good.paths[0], dest).action == "adopted"
    assert identity(dest) == before
    assert merge(good.paths[0], dest).action == "unchanged"


def test_another_set_is_not_taken_for_the_one_in_the_manifest(
    good: ShardSet, dest: Path, tmp_path: Path
) -> None:
    merge(good.paths[0], dest)
    metadata = (*METADATA[:-1], ("tiny.template", STRING, "{{ y }}\n" * 10))
    other = shard_set(tmp_path / "other", (2,), metadata=metadata)
    assert len(other.merged) == len(good.merged)
    assert merge(other.paths[0], dest).action == "merged"
    assert dest.read_bytes() == other.merged
    # the same model in another division needs no writing
    assert merge(shard_set(tmp_path / "third", metadata=metadata).paths[0], dest).action == (
        "adopted"
    )
    manifest = json.loads(manifest_path(dest).read_text())
    assert [source["name"] for source in manifest["sources"]] == [p.name for p in good.paths]


def test_check_mode_writes_nothing(good: ShardSet, dest: Path, tmp_path: Path) -> None:
    def look() -> list[tuple[str, int]]:
        return sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))

    before = look()
    result = merge(good.paths[0], dest, check_mode=True)
    assert (result.action, result.changed) == ("merged", True)
    assert (result.size, result.tensors) == (len(good.merged), len(TENSORS))
    nowhere = merge(good.paths[0], tmp_path / "later" / "x.gguf", check_mode=True)
    assert nowhere.action == "merged"
    awaited = merge(tmp_path / "later" / "M-00001-of-00002.gguf", dest, check_mode=True)
    assert (awaited.action, awaited.changed, awaited.size) == ("awaited", True, None)
    assert look() == before
    good.paths[1].unlink()
    with pytest.raises(GpuboxError, match="missing"):
        merge(good.paths[0], dest, check_mode=True)

    good.write()
    merge(good.paths[0], dest)
    partial_path(dest).write_bytes(b"left over")
    before = look()
    assert merge(good.paths[0], dest, check_mode=True).action == "unchanged"
    manifest_path(dest).unlink()
    before = look()
    assert merge(good.paths[0], dest, check_mode=True).action == "adopted"
    assert look() == before


# ------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("refused", ["open", "write", "allocate"])
def test_file_systems_without_direct_writes_are_served(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch, number: int, refused: str
) -> None:
    """As tmpfs, overlay, NFS and ZFS of different ages do it."""
    calls = []
    real_open, real_write = os.open, system.write

    def refuse(*_: object) -> int:
        calls.append(refused)
        raise OSError(number, os.strerror(number))

    def write(descriptor: int, data: memoryview, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refuse()
        return real_write(descriptor, data, position)

    if refused == "open":
        monkeypatch.setattr(
            copy.os,
            "open",
            lambda path, flags, *mode: (
                refuse() if flags & os.O_DIRECT else real_open(path, flags, *mode)
            ),
        )
    elif refused == "write":
        monkeypatch.setattr(system, "write", write)
    else:
        monkeypatch.setattr(system, "_fallocate", refuse)
    merge(good.paths[0], dest)
    assert dest.read_bytes() == good.merged
    # asked once, not for each block; reads ask for each file
    assert calls == [refused] * (1 + len(good.paths) if refused == "open" else 1)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_systems_without_direct_reads_are_served(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, refused = os.preadv, []

    def preadv(descriptor: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(number, os.strerror(number))
        return real(descriptor, views, offset)

    monkeypatch.setattr(system, "in_cache", lambda *_: False)
    monkeypatch.setattr(copy.os, "preadv", preadv)
    merge(good.paths[0], dest, options=Options(verify=True))
    assert dest.read_bytes() == good.merged
    assert refused


def drop(path: Path, length: int = 0) -> None:
    """Take the first bytes of a file, or all, out of the page cache."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        system.forget(stream.fileno(), 0, length)


def cached(path: Path, offset: int, length: int) -> bool | None:
    with path.open("rb") as stream:
        return system.in_cache(stream.fileno(), offset, length)


@pytest.mark.parametrize("seen", [True, False, None], ids=["cached", "not cached", "unknown"])
def test_the_page_cache_is_left_as_found(
    tmp_path: Path, dest: Path, monkeypatch: pytest.MonkeyPatch, seen: bool | None
) -> None:
    big = tuple(TensorData(f"blk.{n}.weight", (256, 8000), TYPE_Q4_K) for n in range(4))  # 1.15 MB
    shards = shard_set(tmp_path / "shards", (2,), big)
    drop(shards.paths[0])
    if cached(shards.paths[0], 1 << 20, 1 << 20) is not False:
        pytest.skip("this kernel does not say what is cached, or this file system is memory")
    if seen is None:
        monkeypatch.setattr(system, "in_cache", lambda *_: None)
    for path in shards.paths:
        drop(path)
        if seen:
            path.read_bytes()
    merge(shards.paths[0], dest, options=Options(verify=True))
    monkeypatch.undo()
    size = dest.stat().st_size
    found = [(path, path.stat().st_size) for path in shards.paths]
    for path, length in found:
        # the header was read through the cache, with what the kernel reads ahead
        assert cached(path, length - (1 << 20), 1 << 20) is bool(seen)
    assert cached(dest, size - (1 << 20), 1 << 20) is False
    assert dest.read_bytes() == shards.merged


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_file_is_read_the_same_whatever_is_cached(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    size = data.draw(st.integers(1, 5 * system.PAGE))
    content = hashlib.shake_128(b"any").digest(size)
    path.write_bytes(content)
    drop(path, data.draw(st.sampled_from([0, system.PAGE, 2 * system.PAGE, 1 << 30])))
    room = data.draw(st.sampled_from([1, 200, system.PAGE, 3 * system.PAGE]))
    scratch = system.memory(room + 2 * system.PAGE)
    lead = data.draw(st.sampled_from([0, 32, system.PAGE]))
    view = system.memory(lead + room)[lead:]
    with path.open("rb") as stream, copy._File(stream.fileno(), scratch) as file:
        for _ in range(data.draw(st.integers(1, 4))):
            offset = data.draw(st.one_of(st.integers(0, size), st.sampled_from([0, system.PAGE])))
            length = data.draw(st.one_of(st.integers(1, room), st.just(room)))
            expected = content[offset : offset + length]
            ahead = data.draw(st.integers(length, room))
            assert file.read(view[:length], offset, ahead) == len(expected)
            assert view[: len(expected)] == expected


@pytest.mark.parametrize("method", ["copy", "in_place"])
def test_a_set_may_have_more_shards_than_a_process_open_files(
    tmp_path: Path, dest: Path, method: str
) -> None:
    tensors = tuple(TensorData(f"blk.{number}.weight", (8,)) for number in range(150))
    shards = shard_set(tmp_path / "shards", tuple(range(1, 150)), tensors)
    code = (
        "import resource, sys; from gpubox.gguf_merge import command\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        f"sys.exit(command.main([{str(shards.paths[0])!r}, {str(dest)!r}, '--method', {method!r}]))"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert dest.read_bytes() == shards.merged


def test_short_writes_are_gone_on_with(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "write", lambda fd, data, at: os.pwrite(fd, bytes(data[:999]), at))
    merge(good.paths[0], dest)
    assert dest.read_bytes() == good.merged


def test_writes_go_past_the_page_cache_where_possible(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb+") as stream, copy.Target(stream.fileno()) as target:
        if not target.direct:
            pytest.skip("this file system writes through the page cache only")
        data = memoryview(mmap.mmap(-1, 3 * system.PAGE))
        data[:] = os.urandom(len(data))
        target.write(data[: 2 * system.PAGE + 5], 0)
        assert target.direct
        assert path.read_bytes() == bytes(data[: 2 * system.PAGE + 5])


def test_a_write_that_lies_about_its_end_is_not_published(
    tmp_path: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = shard_set(tmp_path / "shards", tensors=TENSORS[:6])  # no padding behind the last one
    total = len(shards.merged)
    monkeypatch.setattr(system, "preallocate", lambda *_: None)
    monkeypatch.setattr(
        system,
        "write",
        lambda fd, data, at: len(data) if at + len(data) == total else os.pwrite(fd, data, at),
    )
    with pytest.raises(GpuboxError, match="not what was to be written"):
        merge(shards.paths[0], dest)
    assert not dest.exists()


def test_a_disk_that_does_not_keep_what_was_written_is_noticed(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def write(descriptor: int, data: memoryview, position: int) -> int:
        changed = bytearray(data)
        changed[-40] ^= 1
        return real(descriptor, changed, position)

    monkeypatch.setattr(system, "write", write)
    with pytest.raises(GpuboxError, match="not what was to be written"):
        merge(good.paths[0], dest, options=Options(verify=True))
    assert not list(dest.parent.iterdir())


def test_the_content_is_on_the_disk_before_the_name(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def record(call: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(descriptor: int) -> None:
            target = Path(f"/proc/self/fd/{descriptor}").readlink()
            there = [path.exists() for path in (journal_path(dest), dest, manifest_path(dest))]
            order.append((target.name, *there))
            call(descriptor)

        return recorded

    monkeypatch.setattr(system, "sync", record(system.sync))
    monkeypatch.setattr(system, "sync_data", record(system.sync_data))
    merge(good.paths[0], dest)
    journal_name, manifest_name = journal_path(dest).name, manifest_path(dest).name
    assert order == [
        (partial_path(dest).name, False, False, False),  # the data
        (f"{journal_name}.gpubox-new", False, False, False),
        (dest.parent.name, True, False, False),
        (partial_path(dest).name, True, False, False),  # length, owner, mode
        (dest.parent.name, True, True, False),  # the name
        (f".{manifest_name}.gpubox-new", True, True, False),
        (dest.parent.name, True, True, True),
    ]
    assert not journal_path(dest).exists()


def test_shards_on_another_file_system(tmp_path: Path, dest: Path) -> None:
    memory = Path("/dev/shm")  # noqa: S108
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    folder = memory / f"gpubox-test-{os.getpid()}"
    try:
        shards = shard_set(folder)
        merge(shards.paths[0], dest)
        assert dest.read_bytes() == shards.merged
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_blocks_and_steps_smaller_than_a_tensor(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "BLOCK", 7)
    monkeypatch.setattr(digest, "PIECE", 3)
    seen = []
    report = lambda *told: seen.append(told)  # noqa: E731
    merge(good.paths[0], dest, options=Options(epoch=1000, progress=report))
    assert dest.read_bytes() == good.merged
    assert seen == sorted(seen)
    assert seen[-1] == ("copying", len(good.merged), len(good.merged))
    manifest = manifest_path(dest).read_text()
    manifest_path(dest).unlink()
    assert merge(good.paths[0], dest).action == "adopted"
    assert manifest_path(dest).read_text() == manifest


@pytest.mark.parametrize("kind", ["grown", "shorter", "rewritten"])
def test_a_shard_that_changes_meanwhile_is_noticed(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(copy, "BLOCK", 100)
    content = good.paths[1].read_bytes()

    def meddle(_: str, done: int, total: int) -> None:
        if done > total // 2:
            changed = {"grown": content + b"x", "shorter": content[:200], "rewritten": content}
            good.paths[1].write_bytes(changed[kind])

    with pytest.raises(GpuboxError, match="changed while"):
        merge(good.paths[0], dest, options=Options(progress=meddle))
    assert not list(dest.parent.iterdir())


def test_a_full_disk_leaves_nothing_and_the_old_file_alone(good: ShardSet, dest: Path) -> None:
    """A limit on the size of files stands for the full disk: the kernel fails the same call."""
    dest.write_bytes(b"the old model")
    code = (
        "import resource, sys; from gpubox.gguf_merge import command;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (2000, {resource.RLIM_INFINITY}));"
        f"sys.exit(command.main([{str(good.paths[0])!r}, {str(dest)!r}]))"
    )
    done = run(code)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "nothing was published" in done.stderr
    assert snapshot(dest.parent) == {dest.name: b"the old model"}


@pytest.mark.parametrize(
    ("limit", "value", "option"),
    [("NOFILE", 4, "ulimit -n"), ("FSIZE", 2000, "ulimit -f"), ("AS", 0, "ulimit -v")],
)
def test_a_limit_of_the_process_is_named_as_what_to_raise(
    good: ShardSet, dest: Path, limit: str, value: int, option: str
) -> None:
    code = (
        "import resource, sys; from gpubox.gguf_merge import command;"
        f"limit = resource.RLIMIT_{limit};"
        f"resource.setrlimit(limit, ({value}, resource.getrlimit(limit)[1]));"
        f"sys.exit(command.main([{str(good.paths[0])!r}, {str(dest)!r}, '--quiet']))"
    )
    done = run(code)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert option in done.stderr
    assert not list(dest.parent.iterdir())


@pytest.mark.parametrize("started", [0, 1])
def test_a_thread_that_cannot_be_started_is_told(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    monkeypatch.setattr(copy, "BLOCK", 100)
    start, fill = threading.Thread.start, copy.Sources.fill
    count, refused = 0, threading.Event()

    def start_few(thread: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count > started:
            refused.set()
            raise RuntimeError("can't start new thread")  # as Python says it
        start(thread)

    def fill_later(*arguments: Any) -> None:
        refused.wait(AT_ONCE)  # or the first thread does the work of all
        fill(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_few)
        patch.setattr(copy.Sources, "fill", fill_later)
        message = refusal(good.paths[0], dest)
    assert "can't start new thread" in message
    assert "ulimit -u" in message
    assert merge(good.paths[0], dest).action == "merged"


def test_a_thread_that_cannot_be_started_for_the_digests_is_told(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(GpuboxError, match="ulimit -u"):
        merge(good.paths[0], dest, options=Options(sha256={"x": "0" * 64}))
    assert not list(dest.parent.iterdir())


def test_a_folder_where_the_manifest_goes_is_refused_first(good: ShardSet, dest: Path) -> None:
    for path in (manifest_path(dest), journal_path(dest), partial_path(dest)):
        path.mkdir()
        assert f"{path}: a directory" in refusal(good.paths[0], dest)
        path.rmdir()


@pytest.mark.parametrize("step", ["folder", "manifest"])
def test_what_fails_after_the_publication_does_not_deny_it(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real = {"folder": system.sync_folder, "manifest": system.rename}[step]

    def fail(*paths: Path) -> None:
        if dest.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(paths[0]))
        real(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(system, real.__name__, fail)
        with pytest.raises(GpuboxError) as caught:
            merge(good.paths[0], dest)
    assert "nothing was published" not in str(caught.value)
    assert f"{dest} is in its place" in caught.value.remedy
    assert dest.read_bytes() == good.merged
    assert merge(good.paths[0], dest).action == "adopted"
    assert {path.name for path in dest.parent.iterdir()} == {dest.name, manifest_path(dest).name}


def test_an_error_names_a_file_not_a_descriptor(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, *_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), descriptor)  # as os.setxattr does

    monkeypatch.setattr(system, "mark", fail)
    monkeypatch.setattr(merging, "require_in_place", lambda *_: None)
    with pytest.raises(GpuboxError) as caught:
        merge(good.paths[0], dest, options=Options(merging.Method.IN_PLACE))
    assert caught.value.measured == f"{good.paths[0]}: Input/output error"


def test_a_second_merge_to_the_same_file_is_refused(good: ShardSet, dest: Path) -> None:
    with files.partial_file(dest) as descriptor:
        os.write(descriptor, b"work of the first")
        assert "another merge" in refusal(good.paths[0], dest)
        assert partial_path(dest).read_bytes() == b"work of the first"
    assert not partial_path(dest).exists()
    assert merge(good.paths[0], dest).action == "merged"


ODD = [
    "", ".", "..", "x" * 255, "x" * 256, "x" * 240, "a/" * 3000 + "x", "nul\0byte", "new\nline",
    "no text \udcff", "no character \ud800", "loop", "loop/x", "file/x", "pipe", "-x",
    "no/such/folder", "x-00001-of-00003.gguf", "x" * 250 + "-00001-of-00003.gguf",
    "-00001-of-00003.gguf", "\0-00001-of-00003.gguf",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:24])
@pytest.mark.parametrize("check_mode", [True, False])
def test_odd_paths_are_merged_or_refused(
    good: ShardSet, tmp_path: Path, name: str, check_mode: bool
) -> None:
    box = tmp_path / "box"
    box.mkdir()
    (box / "loop").symlink_to("loop")
    (box / "file").write_bytes(b"")
    os.mkfifo(box / "pipe")
    for src, dest in ((box / name, box / "out.gguf"), (good.paths[0], box / name)):
        try:
            result = merge(src, dest, check_mode)
        except GpuboxError:
            assert not any(path.name.startswith(".") for path in box.iterdir())
            continue
        if check_mode:
            assert result.action in ("merged", "awaited")
        else:
            assert result.path.read_bytes() == good.merged
    with pytest.raises(GpuboxError):
        merge(good.paths[0], Path("/"), check_mode)
    with contextlib.suppress(GpuboxError):
        read_header(box / name)


def test_names_that_are_no_text_are_told(
    good: ShardSet, dest: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = dest.with_name("no text \udcff")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert command.main([str(good.paths[0]), str(odd)]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "no text \\udcff" in capfd.readouterr().out
    assert odd.read_bytes() == good.merged


def test_a_planted_link_is_not_followed(good: ShardSet, dest: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    partial_path(dest).symlink_to(victim)
    with pytest.raises(GpuboxError):
        merge(good.paths[0], dest)
    assert victim.read_bytes() == b"precious"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "module_utils")},
        capture_output=True,
        text=True,
        check=False,
        timeout=AT_ONCE,
    )


@pytest.fixture
def stopped_midway(good: ShardSet, dest: Path) -> Iterator[subprocess.Popen[str]]:
    """The command line in the middle of its copy."""
    code = (
        "import sys, time; from gpubox.gguf_merge import copy, command as m\n"
        "class Wait:\n"
        "    def __call__(self, what, done, total):\n"
        "        if done > total // 2:\n"
        "            print('half', flush=True)\n"
        # a signal just before a long sleep begins would be seen after it
        "            for _ in range(60_000): time.sleep(0.01)\n"
        "copy.BLOCK, m.Meter = 100, Wait\n"
        f"sys.exit(m.main([{str(good.paths[0])!r}, {str(dest)!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "module_utils")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("old", [None, b"the old model"])
def test_sigkill_publishes_nothing_and_a_rerun_recovers(
    good: ShardSet,
    dest: Path,
    stopped_midway: subprocess.Popen[str],
    old: bytes | None,
) -> None:
    sources = snapshot(good.folder)
    if old is not None:
        dest.write_bytes(old)
    assert partial_path(dest).stat().st_size > 0
    with pytest.raises(GpuboxError, match="another merge"):
        merge(good.paths[0], dest)
    stopped_midway.kill()
    stopped_midway.wait()
    assert (dest.read_bytes() if dest.exists() else None) == old
    assert merge(good.paths[0], dest).action == "merged"
    assert dest.read_bytes() == good.merged
    assert {path.name for path in dest.parent.iterdir()} == {
        dest.name, manifest_path(dest).name,
    }  # fmt: skip
    assert snapshot(good.folder) == sources


def test_nothing_of_a_longer_leftover_stays(good: ShardSet, dest: Path) -> None:
    partial_path(dest).write_bytes(b"\xff" * (len(good.merged) + 100))
    assert merge(good.paths[0], dest).action == "merged"
    assert dest.read_bytes() == good.merged


def test_an_unneeded_leftover_is_removed(good: ShardSet, dest: Path) -> None:
    merge(good.paths[0], dest)
    partial_path(dest).write_bytes(b"left by a killed run")
    assert merge(good.paths[0], dest).action == "unchanged"
    assert not partial_path(dest).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_clean_up(
    dest: Path, stopped_midway: subprocess.Popen[str], number: signal.Signals
) -> None:
    stopped_midway.send_signal(number)
    assert stopped_midway.wait(timeout=AT_ONCE) == 128 + number
    assert not list(dest.parent.iterdir())


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_mutated_shards_are_refused_or_merged_faithfully(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    shards = shard_set(folder / "shards")
    victim = data.draw(st.integers(0, 2))
    shard, path = shards.shards[victim], shards.paths[victim]
    content = path.read_bytes()[len(shard.header()) :]
    header = mutated(data, shard, most=3)
    cut = data.draw(st.one_of(st.just(0), st.integers(0, len(content))))
    # behind the header as it was, or laid out for the one that it is now
    pad = data.draw(st.sampled_from([b"", bytes(-len(header) % 32)]))
    data_start = -len(shard.header()) % 32 if pad else 0
    path.write_bytes(header + pad + content[data_start : len(content) - cut])
    dest = folder / "merged.gguf"
    try:
        merge(shards.paths[0], dest)
    except GpuboxError:
        assert not dest.exists()
        return
    merged = read_header(dest)
    found = iter(merged.tensors)
    alignment = merged.own_alignment or 32
    for path in shards.paths:
        header = read_header(path)
        own = alignment_of(header, read_header(shards.paths[0]))
        for tensor in header.tensors:
            copy = next(found)
            assert copy.name == tensor.name
            assert (
                extent(dest, merged.data_start(alignment) + copy.offset, tensor.size)
                == extent(path, header.data_start(own) + tensor.offset, tensor.size)
            )  # fmt: skip
    assert next(found, None) is None


def extent(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(size)


# ------------------------------------------------------------------------------ command line


def test_the_command_line(good: ShardSet, dest: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert command.main([str(good.paths[0]), str(dest), "--check"]) == 0
        assert capfd.readouterr().out.startswith("would be merged: ")
        assert not dest.exists()
        assert command.main([str(good.paths[0]), str(dest)]) == 0
        told = capfd.readouterr()
        assert told.out.startswith(f"merged: {dest}, {len(good.merged)} bytes, 7 tensors from 3")
        assert "GB" in told.err
        assert command.main([str(good.paths[0]), str(dest), "--quiet"]) == 0
        assert capfd.readouterr().out.startswith("unchanged: ")
        assert command.main([str(good.paths[0]), str(good.paths[1])]) == 1
        told = capfd.readouterr()
        assert told.err.startswith("measured: ")
        assert not told.out
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_an_empty_list_of_digests_is_not_taken_for_none(
    good: ShardSet, dest: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sums = tmp_path / "sums"
    sums.write_bytes(b"")
    arguments = [str(good.paths[0]), str(dest), "--sha256sums", str(sums)]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert command.main(arguments) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert f"measured: {sums}: empty" in capfd.readouterr().err
    assert not dest.exists()


def test_a_shard_that_cannot_be_read_is_the_one_that_is_named(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad disk under a shard: the kernel's error does not tell which file it was."""
    real = os.preadv

    def fail(descriptor: int, *arguments: Any) -> int:
        if os.path.samestat(os.fstat(descriptor), good.paths[1].stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", fail)
    message = refusal(good.paths[0], dest)
    assert f"measured: {good.paths[1]}: Input/output error" in message
    assert "kernel's log" in message
