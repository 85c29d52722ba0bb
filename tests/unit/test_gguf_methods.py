# SPDX-License-Identifier: Apache-2.0
"""What a merge may be asked for: digests, verification, foreign shards, in place, shared blocks."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gpubox.errors import GpuboxError
from gpubox.gguf import read_header
from gpubox.gguf_merge import Method, Options, bytes_held, copy, destination, digest, merge, system
from gpubox.gguf_merge.destination import Space, pieces
from gpubox.gguf_merge.files import journal_path, manifest_path, partial_path
from gpubox.gguf_merge.plan import make_shared_plan
from gpubox.gguf_merge.progress import Rate
from gpubox.gguf_merge.shards import read_set
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gguf_files import (
    METADATA,
    STRING,
    TENSORS,
    TYPE_F32,
    TYPE_Q4_K,
    U32,
    GgufFile,
    ShardSet,
    TensorData,
    shard_set,
)

REFLINK = Options(method=Method.REFLINK)
IN_PLACE = Options(method=Method.IN_PLACE)
VERIFY = Options(verify=True)


@pytest.fixture
def good(tmp_path: Path) -> ShardSet:
    return shard_set(tmp_path / "shards")


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "Model-Q4.gguf"


def manifest(dest: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(manifest_path(dest).read_text())
    return document


def writable(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


# ------------------------------------------------------------------------------ digests

# what xxhash from PyPI (xxHash 0.8.x, its own copy) gives for these bytes
XXH128 = {
    b"": "99aa06d3014798d86001c324468d497f",
    b"gpubox": "a7caa418a83aed0cdaeb8377efa38e80",
}


def test_xxh128_is_what_the_tool_prints() -> None:
    if digest.preferred() != digest.XXH128:
        pytest.skip("libxxhash is not on this machine")
    for content, expected in XXH128.items():
        found = digest.new(digest.XXH128)
        found.update(writable(content))
        assert found.hexdigest() == expected


def test_without_libxxhash_the_manifest_says_blake2b(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "_library", lambda: None)
    result = merge(good.paths[0], dest)
    expected = hashlib.blake2b(good.merged).hexdigest()
    assert result.digest == f"blake2b:{expected}"
    assert manifest(dest)["algorithm"] == "blake2b"
    assert merge(good.paths[0], dest, options=VERIFY).action == "unchanged"


def test_a_digest_that_this_machine_lacks_is_told(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(good.paths[0], dest)
    if manifest(dest)["algorithm"] != digest.XXH128:
        pytest.skip("libxxhash is not on this machine")
    monkeypatch.setattr(digest, "_library", lambda: None)
    assert merge(good.paths[0], dest).action == "unchanged"
    with pytest.raises(GpuboxError, match="apt-get install libxxhash0"):
        merge(good.paths[0], dest, options=VERIFY)


@settings(max_examples=60)
@given(data=st.data())
def test_the_digests_do_not_depend_on_how_the_bytes_come(data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=1, max_size=300))
    bounds = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    runs = [
        digest.Run(index, start, end - start)
        for index, (start, end) in enumerate(zip(bounds[::2], bounds[1::2], strict=False))
    ]
    ledger = digest.Ledger(runs, digest.preferred())
    at = 0
    while at < len(content):
        size = data.draw(st.integers(1, 80))
        ledger.update(writable(content[at : at + size]))
        at += size

    def one(part: bytes) -> str:
        whole = digest.new(digest.preferred())
        whole.update(writable(part))
        return whole.hexdigest()

    assert ledger.whole == one(content)
    assert ledger.runs == [one(content[run.position : run.end]) for run in runs]


def test_the_manifest_names_sizes_digests_and_sources(good: ShardSet, dest: Path) -> None:
    result = merge(good.paths[0], dest)
    document = manifest(dest)
    content = dest.read_bytes()
    assert result.digest == f"{document['algorithm']}:{document['merged']['digest']}"
    for run, path in zip(document["runs"], good.paths, strict=True):
        assert run["source"] == path.name
        data = digest.new(document["algorithm"])
        data.update(writable(content[run["position"] : run["position"] + run["length"]]))
        assert data.hexdigest() == run["digest"]
    header, last = read_header(dest), document["runs"][-1]
    assert document["runs"][0]["position"] == header.data_start(32)
    assert last["position"] + last["length"] == header.data_end(32)
    for source, path in zip(document["sources"], good.paths, strict=True):
        status = path.stat()
        assert (source["name"], source["size"], source["mtime_ns"], source["inode"]) == (
            path.name, status.st_size, status.st_mtime_ns, status.st_ino,
        )  # fmt: skip


# ------------------------------------------------------------------------------ verification


def damaged(dest: Path, position: int) -> None:
    """Another byte, and nothing in size or times that tells."""
    status = dest.stat()
    with dest.open("rb+") as stream:
        old = os.pread(stream.fileno(), 1, position)
        os.pwrite(stream.fileno(), bytes([old[0] ^ 1]), position)
    os.utime(dest, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("position", [10, -50])
def test_silent_damage_is_found_and_mended(good: ShardSet, dest: Path, position: int) -> None:
    merge(good.paths[0], dest)
    damaged(dest, position % len(good.merged))
    assert merge(good.paths[0], dest).action == "unchanged"  # nobody asked to read it
    predicted = merge(good.paths[0], dest, check_mode=True, options=VERIFY)
    assert (predicted.action, dest.read_bytes() == good.merged) == ("merged", False)
    assert merge(good.paths[0], dest, options=VERIFY).action == "merged"
    assert dest.read_bytes() == good.merged
    assert merge(good.paths[0], dest, options=VERIFY).action == "unchanged"


def test_damage_without_shards_to_mend_it_is_told_by_shard(good: ShardSet, dest: Path) -> None:
    merge(good.paths[0], dest)
    second = manifest(dest)["runs"][1]
    damaged(dest, second["position"] + 5)
    good.paths[0].unlink()
    with pytest.raises(GpuboxError) as caught:
        merge(good.paths[0], dest, options=VERIFY)
    assert f"the tensors of {good.paths[1].name} ({second['length']} bytes" in str(caught.value)
    damaged(dest, second["position"] + 5)
    damaged(dest, 10)
    with pytest.raises(GpuboxError, match="the header or the padding"):
        merge(good.paths[0], dest, options=VERIFY)


def test_nothing_is_read_for_long_without_a_word(good: ShardSet, dest: Path) -> None:
    seen = []
    options = replace(VERIFY, progress=lambda *told: seen.append(told), sha256=sums(good))
    spaces = []
    merge(good.paths[0], dest, options=replace(options, notice=spaces.append))
    sizes = sum(path.stat().st_size for path in good.paths)
    total = len(good.merged)
    assert [told for told in seen if told[1] == told[2]] == [
        ("sha256 of the shards", sizes, sizes),
        ("copying", total, total),
        ("verifying", total, total),
    ]
    assert [space.needed for space in spaces] == [total]
    assert str(spaces[0]).startswith("needs 0.00 GB, ")


def test_rate_and_time_left() -> None:
    now = [100.0]
    rate = Rate(lambda: now[0])
    assert rate.line("copying", 0, 10_000_000_000) == "copying: 0.00 of 10.00 GB"
    now[0] = 102.0
    assert rate.line("copying", 4_000_000_000, 10_000_000_000) == (
        "copying: 4.00 of 10.00 GB, 2000 MB/s, 2 s so far, 3 s left"
    )
    # another stage has its own rate, and what was there before does not count
    assert rate.line("verifying", 5_000_000_000, 10_000_000_000) == "verifying: 5.00 of 10.00 GB"
    now[0] = 103.0
    assert ", 1000 MB/s, 1 s so far, 4 s left" in rate.line(
        "verifying", 6_000_000_000, 10_000_000_000
    )


# ------------------------------------------------------------------------------ foreign shards


def sums(shards: ShardSet) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards.paths}


def test_a_foreign_shard_with_the_same_counts_is_told_by_its_sha256(
    good: ShardSet, dest: Path
) -> None:
    expected = {**sums(good), "config.json": "0" * 64}
    content = good.paths[1].read_bytes()
    good.paths[1].write_bytes(content.replace(TENSORS[3].data[:8], b"revision"))
    assert not read_set(good.paths)[1]  # nothing else tells
    with pytest.raises(GpuboxError) as caught:
        merge(good.paths[0], dest, options=Options(sha256=expected))
    assert str(good.paths[1]) in str(caught.value)
    assert expected[good.paths[1].name] in str(caught.value)
    del expected[good.paths[0].name]
    with pytest.raises(GpuboxError, match=r"2 faults(.|\n)*its sha256 is not in the list"):
        merge(good.paths[0], dest, options=Options(sha256=expected))
    assert not list(dest.parent.iterdir())
    good.paths[1].write_bytes(content)
    expected = {name: value.upper() for name, value in sums(good).items()}
    assert merge(good.paths[0], dest, options=Options(sha256=expected)).action == "merged"
    assert [source["sha256"] for source in manifest(dest)["sources"]] == list(expected.values())


# ------------------------------------------------------------------------------ in place


@pytest.mark.parametrize("epoch", [700, 1 << 30])
def test_in_place_gives_the_same_file_and_takes_the_shards(
    tmp_path: Path, dest: Path, epoch: int
) -> None:
    shards = shard_set(tmp_path / "shards", cuts=(0, 3))  # the first one holds no tensors
    result = merge(shards.paths[0], dest, options=replace(IN_PLACE, epoch=epoch, verify=True))
    assert (result.action, dest.read_bytes()) == ("merged", shards.merged)
    assert not any(path.exists() for path in shards.paths)
    assert not journal_path(dest).exists()
    assert merge(shards.paths[0], dest, options=IN_PLACE).action == "unchanged"


def test_in_place_needs_the_space_of_one_epoch(tmp_path: Path, dest: Path) -> None:
    big = TensorData("big.weight", (256, 40_000), TYPE_Q4_K)  # 5.76 MB
    shards = shard_set(tmp_path / "shards", (1,), (big, replace(big, name="big2.weight")))
    epoch = 1 << 20
    held: list[int] = []

    def watch(*_: object) -> None:
        files = [partial_path(dest), *shards.paths]
        held.append(sum(path.stat().st_blocks * 512 for path in files if path.exists()))

    before = sum(path.stat().st_blocks * 512 for path in shards.paths)
    spaces = []
    options = replace(IN_PLACE, epoch=epoch, progress=watch, notice=spaces.append)
    merge(shards.paths[0], dest, options=options)
    assert dest.read_bytes() == shards.merged
    assert spaces[0].needed == epoch
    assert max(held) <= before + epoch + (1 << 16)


@pytest.mark.parametrize("call", ["preallocate", "punch", "write", "rename"])
@pytest.mark.parametrize("times", range(0, 12, 3))
def test_what_an_interrupted_merge_in_place_holds_twice_counts_as_free(
    tmp_path: Path, dest: Path, call: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = TensorData("big.weight", (256, 20_000), TYPE_Q4_K)  # 2.88 MB
    shards = shard_set(tmp_path / "shards", (1,), (big, replace(big, name="big2.weight")))
    real, left, epoch = getattr(system, call), [times], 1 << 20

    def stopped(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return real(*given)

    def on_disk() -> int:
        files = [partial_path(dest), *shards.paths]
        return sum(path.stat().st_blocks * 512 for path in files if path.exists())

    def held() -> int:
        return bytes_held(Method.IN_PLACE, dest, shards.paths)

    before = on_disk()
    assert held() == 0
    options = replace(IN_PLACE, epoch=epoch)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(system, call, stopped)
        merge(shards.paths[0], dest, options=options)
    if not dest.exists():
        # as much is free as when the merge began, but for the ends of pages
        assert abs(on_disk() - held() - before) <= 1 << 16
        assert held() <= epoch + (1 << 16)
    spaces: list[Space] = []
    merge(shards.paths[0], dest, options=replace(options, notice=spaces.append))
    assert dest.read_bytes() == shards.merged


def test_what_an_interrupted_copy_holds_counts_as_free(good: ShardSet, dest: Path) -> None:
    assert bytes_held(Method.COPY, dest, good.paths) == 0
    partial_path(dest).write_bytes(bytes(5 * 4096))
    link = dest.with_name("link.gguf")
    link.symlink_to(dest)
    for path in (dest, link):
        assert bytes_held(Method.COPY, path, good.paths) == 5 * 4096
        assert bytes_held(Method.REFLINK, path, good.paths) == 0


def test_a_fresh_set_of_the_same_names_is_merged_again(good: ShardSet, dest: Path) -> None:
    merge(good.paths[0], dest, options=IN_PLACE)
    again = shard_set(good.folder, metadata=(*METADATA[:-1], ("tiny.template", STRING, "y")))
    assert merge(again.paths[0], dest, options=IN_PLACE).action == "merged"
    assert dest.read_bytes() == again.merged


def test_shards_that_others_use_are_not_taken(good: ShardSet, dest: Path, tmp_path: Path) -> None:
    (tmp_path / "other name").hardlink_to(good.paths[0])
    good.paths[1].rename(tmp_path / "blob")
    good.paths[1].symlink_to(tmp_path / "blob")
    before = {path: path.read_bytes() for path in good.paths}
    with pytest.raises(GpuboxError, match="2 faults"):
        merge(good.paths[0], dest, options=IN_PLACE)
    assert {path: path.read_bytes() for path in good.paths} == before


def test_a_whole_file_is_not_merged_in_place(tmp_path: Path, dest: Path) -> None:
    src = tmp_path / "whole.gguf"
    src.write_bytes(GgufFile(METADATA, TENSORS).to_bytes())
    with pytest.raises(GpuboxError, match="not split"):
        merge(src, dest, options=IN_PLACE)
    assert src.exists()


@pytest.mark.parametrize("missing", ["punch", "mark"])
def test_a_file_system_that_cannot_is_refused_before_anything_is_taken(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(system, missing, refuse)
    before = {path: path.read_bytes() for path in good.paths}
    with pytest.raises(GpuboxError, match="cannot merge in place"):
        merge(good.paths[0], dest, options=IN_PLACE)
    assert {path: path.read_bytes() for path in good.paths} == before
    assert not list(dest.parent.iterdir())


def test_verification_in_place_comes_before_the_taking(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(descriptor: int, data: memoryview, position: int) -> int:
        return os.pwrite(descriptor, bytes(len(data)), position)

    monkeypatch.setattr(system, "write", write)
    before = {path: path.read_bytes() for path in good.paths}
    with pytest.raises(GpuboxError, match="not what was to be written"):
        merge(good.paths[0], dest, options=replace(IN_PLACE, verify=True))
    assert {path: path.read_bytes() for path in good.paths} == before
    assert not list(dest.parent.iterdir())


# ------------------------------------------------------------------------------ shared blocks


def read_by_gguf_py(path: Path) -> list[tuple[str, bytes]]:
    return [(t.name, np.asarray(t.data).tobytes()) for t in gguf.GGUFReader(path).tensors]


def copying_stands_in_for_ficlonerange(
    source: int, target: int, offset: int, position: int, length: int
) -> None:
    """Asks for what the kernel asks for, then copies: no blocks are shared."""
    assert offset % system.PAGE == position % system.PAGE == length % system.PAGE == 0
    assert position + length <= os.fstat(target).st_size
    assert length > 0
    os.pwrite(target, os.pread(source, length, offset), position)


def large_tensors(count: int) -> tuple[TensorData, ...]:
    return tuple(
        TensorData(f"blk.{number}.weight", (2048 + number % 5, 7 + number), TYPE_F32)
        for number in range(count)
    )


@pytest.mark.parametrize("cuts", [(3, 5), (0, 4), ()])
@pytest.mark.parametrize("tensors", [TENSORS, large_tensors(7)], ids=["small", "large"])
def test_the_layout_for_shared_blocks_is_read_by_gguf_py(
    tmp_path: Path,
    dest: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuts: tuple[int, ...],
    tensors: tuple[TensorData, ...],
) -> None:
    monkeypatch.setattr(system, "clone", copying_stands_in_for_ficlonerange)
    shards = shard_set(tmp_path / "shards", cuts, tensors, pad_byte=b"\xaa")
    result = merge(shards.paths[0], dest, options=REFLINK)
    assert (result.action, result.digest) == ("merged", None)
    assert read_by_gguf_py(dest) == [(tensor.name, tensor.data) for tensor in tensors]
    header = read_header(dest)
    assert header.layout_fault(32) is None
    fields = [name for name in gguf.GGUFReader(dest).fields if not name.startswith("GGUF.")]
    assert set(fields) == {
        *(key for key, *_ in METADATA),
        "split.no", "split.tensors.count", "split.count", "gpubox.padding",
    }  # fmt: skip
    assert merge(shards.paths[0], dest, options=REFLINK).action == "unchanged"
    verified = merge(shards.paths[0], dest, options=replace(REFLINK, verify=True))
    assert verified.action == "adopted"  # compared with the shards, and now with digests
    assert verified.digest is not None
    # the layout that llama.cpp reads is another file
    assert merge(shards.paths[0], dest).action == "merged"
    assert dest.read_bytes() == shards.merged


def test_nearly_all_bytes_are_shared(tmp_path: Path) -> None:
    tensors = large_tensors(40)
    shards = shard_set(tmp_path / "shards", (13, 26), tensors)
    plan = make_shared_plan(read_set(shards.paths)[0])
    shared, copied = pieces(plan)
    data = sum(tensor.size for tensor in tensors)
    assert sum(part.length for _, part in shared) > data - 6 * system.PAGE
    extents = sorted([*copied, *((at, at + part.length) for at, part in shared)])
    assert extents[0][0] == 0
    assert extents[-1][1] == plan.size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(extents))


def test_shards_of_another_alignment_are_refused(tmp_path: Path, dest: Path) -> None:
    metadata = (*METADATA, ("general.alignment", U32, 64))
    tensors = tuple(TensorData(f"blk.{number}.weight", (8,)) for number in range(7))
    shards = shard_set(tmp_path / "shards", (3, 5), tensors, metadata=metadata, alignment=64)
    for number in (2, 3):
        shards.shards[number - 1] = replace(shards.shards[number - 1], alignment=32)
    shards.write()
    with pytest.raises(GpuboxError, match="laid out for alignment 32"):
        merge(shards.paths[0], dest, options=REFLINK)


def test_a_file_system_that_cannot_share_is_told(good: ShardSet, dest: Path) -> None:
    shards = shard_set(good.folder, tensors=large_tensors(7))
    with pytest.raises(GpuboxError, match="XFS with reflink, or btrfs"):
        merge_or_skip(shards, dest)
    assert not list(dest.parent.iterdir())


def merge_or_skip(shards: ShardSet, dest: Path) -> None:
    merge(shards.paths[0], dest, options=REFLINK)
    pytest.skip("this file system shares blocks")


@pytest.fixture(params=["xfs", "btrfs"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real file system on a loop device, where this machine can make one."""
    kind = request.param
    if os.geteuid() or shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"needs root and mkfs.{kind}")
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as stream:
        stream.truncate(400 << 20)
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("method", [Method.REFLINK, Method.IN_PLACE, Method.COPY])
def test_real_xfs_and_btrfs(mounted: Path, method: Method) -> None:
    tensors = tuple(
        TensorData(f"blk.{number}.weight", (2048, 500 + number), TYPE_F32) for number in range(6)
    )
    shards = shard_set(mounted / "shards", (2, 4), tensors)
    size = sum(path.stat().st_size for path in shards.paths)
    os.sync()

    def used() -> int:
        status = os.statvfs(mounted)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    before, dest = used(), mounted / "Model-Q4.gguf"
    merge(shards.paths[0], dest, options=Options(method=method, verify=True, epoch=4 << 20))
    assert read_by_gguf_py(dest) == [(tensor.name, tensor.data) for tensor in tensors]
    os.sync()
    if method is Method.REFLINK:
        assert used() - before < size // 10
        for path in shards.paths:
            path.unlink()
        assert read_by_gguf_py(dest) == [(tensor.name, tensor.data) for tensor in tensors]
    else:
        assert dest.read_bytes() == shards.merged


# ------------------------------------------------------------------------------ moving bytes


def test_the_first_failure_of_a_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Origin:
        def fill(self, view: memoryview, position: int, _: memoryview) -> None:
            view[:] = bytes(len(view))
            if position == 20:
                raise ValueError("at 20")

    monkeypatch.setattr(copy, "BLOCK", 10)
    ledger = digest.Ledger((), digest.preferred())
    done: list[int] = []
    with pytest.raises(ValueError, match="at 20"):
        copy.stream(Origin(), 0, 100, ledger, progress=done.append)
    assert ledger.position <= 20
    assert done in ([], [10], [10, 20])


# ------------------------------------------------------------------------------ hostile neighbours


def interrupted(shards: ShardSet, dest: Path, method: Method = Method.IN_PLACE) -> None:
    """Begin a merge and end it in its fourth epoch."""
    epochs = itertools.count()

    def stop(what: str, *_: int) -> None:
        if what == "copying" and next(epochs) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(shards.paths[0], dest, options=Options(method, epoch=700, progress=stop))


def test_a_known_result_does_not_cost_another_set_its_unfinished_merge(
    good: ShardSet, dest: Path, tmp_path: Path
) -> None:
    merge(good.paths[0], dest)
    other = shard_set(tmp_path / "other", metadata=(*METADATA[:-1], ("tiny.template", STRING, "y")))
    interrupted(other, dest)
    assert system.marked(other.paths[0])[1]
    assert merge(good.paths[0], dest).action == "unchanged"
    assert merge(tmp_path / "gone" / good.paths[0].name, dest).action == "unchanged"
    assert merge(other.paths[0], dest, options=IN_PLACE).resumed
    assert dest.read_bytes() == other.merged


def test_a_taken_shard_that_was_fetched_again_onto_the_same_file_is_whole(
    tmp_path: Path, dest: Path
) -> None:
    """The mark stays on the inode; the content tells."""
    shards = shard_set(tmp_path / "shards", (2, 4), large_tensors(6))
    whole = {path: path.read_bytes() for path in shards.paths}
    epochs = itertools.count()

    def stop(what: str, *_: int) -> None:
        if what == "copying" and next(epochs) == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(shards.paths[0], dest, options=Options(Method.IN_PLACE, epoch=1 << 15, progress=stop))
    taken = [path for path in shards.paths if system.marked(path)[1]]
    assert len(taken) >= 2
    partial_path(dest).unlink()
    journal_path(dest).unlink()
    for number, path in enumerate(taken):
        with pytest.raises(GpuboxError, match=f"{path.name}: an unfinished merge in place took"):
            merge(shards.paths[0], dest)
        if not number:  # its beginning came, the rest is still a hole
            path.write_bytes(whole[path][:20_000])
            os.truncate(path, len(whole[path]))
            with pytest.raises(GpuboxError, match=f"{path.name}: an unfinished merge in place"):
                merge(shards.paths[0], dest)
        inode = path.stat().st_ino
        path.write_bytes(whole[path])
        assert (path.stat().st_ino, bool(system.marked(path)[1])) == (inode, True)
    assert merge(shards.paths[0], dest).action == "merged"
    assert dest.read_bytes() == shards.merged
    dest.unlink()
    assert merge(shards.paths[0], dest, options=IN_PLACE).action == "merged"
    assert dest.read_bytes() == shards.merged


def test_a_set_that_was_cut_from_a_file_with_shared_blocks_is_merged_so_again(
    tmp_path: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "clone", copying_stands_in_for_ficlonerange)
    metadata = (*METADATA, ("gpubox.padding", STRING, " " * 100))
    shards = shard_set(tmp_path / "shards", metadata=metadata)
    assert merge(shards.paths[0], dest, options=REFLINK).action == "merged"
    assert read_by_gguf_py(dest) == [(tensor.name, tensor.data) for tensor in TENSORS]
    assert merge(shards.paths[0], dest).action == "merged"
    assert dest.read_bytes() == shards.merged


def test_sums_that_a_resumed_merge_did_not_check_are_not_recorded(
    good: ShardSet, dest: Path
) -> None:
    interrupted(good, dest)
    wrong = {path.name: "0" * 64 for path in good.paths}
    assert merge(good.paths[0], dest, options=replace(IN_PLACE, sha256=wrong)).resumed
    assert [source["sha256"] for source in manifest(dest)["sources"]] == [None] * len(good.paths)


@pytest.mark.parametrize("companion", [partial_path, manifest_path, journal_path])
@pytest.mark.parametrize("linked", [False, True])
def test_an_input_is_not_written_to_under_a_name_of_the_merge(
    tmp_path: Path, dest: Path, companion: Callable[[Path], Path], linked: bool
) -> None:
    source = companion(dest)
    content = GgufFile(METADATA, TENSORS).to_bytes()
    source.write_bytes(content)
    if linked:
        source = tmp_path / "source.gguf"
        source.hardlink_to(companion(dest))
    with pytest.raises(GpuboxError, match="which a merge to"):
        merge(source, dest)
    assert source.read_bytes() == content
    assert not dest.exists()


def test_an_unfinished_result_with_two_names_is_left_alone(
    good: ShardSet, dest: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    partial_path(dest).hardlink_to(theirs)
    with pytest.raises(GpuboxError, match="one of several names"):
        merge(good.paths[0], dest)
    assert theirs.read_bytes() == b"theirs"


def test_a_link_under_the_name_of_a_new_manifest_is_not_followed(
    good: ShardSet, dest: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    manifest_path(dest).with_name(f".{manifest_path(dest).name}.gpubox-new").symlink_to(theirs)
    merge(good.paths[0], dest)
    assert theirs.read_bytes() == b"theirs"
    assert not manifest_path(dest).is_symlink()


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"format": ' + "9" * 5000 + "}", "[]", '{"sources": 1}', "\0"]
)
def test_documents_of_any_text_are_as_good_as_none(good: ShardSet, dest: Path, text: str) -> None:
    manifest_path(dest).write_text(text)
    journal_path(dest).write_text(text)
    assert merge(good.paths[0], dest).action == "merged"
    assert dest.read_bytes() == good.merged


def test_a_pipe_under_the_name_of_a_document_is_not_waited_for(good: ShardSet, dest: Path) -> None:
    os.mkfifo(manifest_path(dest))
    os.mkfifo(journal_path(dest))
    assert merge(good.paths[0], dest).action == "merged"


@pytest.mark.parametrize(
    "change",
    [
        {"runs": [{}]},
        {"runs": 1},
        {"runs": [{"source": 1, "position": "x", "length": None, "digest": []}]},
        {"algorithm": []},
        {"merged": []},
        {"tensors": float("inf")},
    ],
)
def test_a_tampered_manifest_ends_in_a_merge_or_a_message(
    good: ShardSet, dest: Path, change: dict[str, Any]
) -> None:
    merge(good.paths[0], dest)
    manifest_path(dest).write_text(json.dumps({**manifest(dest), **change}))
    for options in (Options(), VERIFY):
        try:
            result = merge(good.paths[0], dest, options=options)
        except GpuboxError:
            continue
        assert result.action in ("unchanged", "adopted")
        assert dest.read_bytes() == good.merged


@pytest.mark.parametrize("algorithm", ["none of ours", [], True])
def test_a_copy_whose_digest_cannot_be_computed_begins_again(
    good: ShardSet, dest: Path, algorithm: object
) -> None:
    interrupted(good, dest, Method.COPY)
    document = json.loads(journal_path(dest).read_text())
    journal_path(dest).write_text(json.dumps({**document, "algorithm": algorithm}))
    result = merge(good.paths[0], dest)
    assert (result.action, result.resumed) == ("merged", 0)
    assert dest.read_bytes() == good.merged


def test_shards_that_could_not_be_removed_are_not_consumed(
    good: ShardSet, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [path.read_bytes() for path in good.paths]
    # root may write everywhere
    monkeypatch.setattr(destination.os, "access", lambda path, _: Path(path) != good.folder)
    with pytest.raises(GpuboxError, match="not writable") as caught:
        merge(good.paths[0], dest, options=IN_PLACE)
    assert f"{good.folder}: " in str(caught.value)
    assert [path.read_bytes() for path in good.paths] == before
    assert not list(dest.parent.iterdir())
    assert merge(good.paths[0], dest).action == "merged"  # a copy leaves them where they are
