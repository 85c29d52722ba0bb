# SPDX-License-Identifier: Apache-2.0
"""Kills, power loss and full disks: a rerun goes on or starts over, and nothing wrong is published.

``make kill-gguf`` stops at every call, and 200 times at random ones (GPUBOX_KILLS).
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpubox.errors import GpuboxError
from gpubox.gguf_merge import Method, Options, copy, merge, system
from gpubox.gguf_merge.files import journal_path, manifest_path, partial_path

from tests.unit.crashes import FAILED, FINISHED, Power, count_calls, in_a_child, stop_at
from tests.unit.gguf_files import ShardSet, shard_set

KILLS = int(os.environ.get("GPUBOX_KILLS", "40"))
STRIDE = 1 if KILLS >= 200 else 3  # of the calls that are stopped at one by one
EPOCH = 512

pytestmark = pytest.mark.forks


class Box:
    """A set and a place for its merger, made anew as often as a test likes."""

    def __init__(self, folder: Path, method: Method) -> None:
        self.folder = folder
        self.method = method
        self.dest = folder / "out" / "Model-Q4.gguf"
        self.dest.parent.mkdir(parents=True)
        self.shards: ShardSet = shard_set(folder / "shards")
        self.sources = self._snapshot()

    def merge(self, **options: object) -> object:
        return merge(
            self.shards.paths[1],
            self.dest,
            options=Options(method=self.method, epoch=EPOCH, **options),  # type: ignore[arg-type]
        )

    def _snapshot(self) -> dict[str, tuple[bytes, int]]:
        return {
            path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in self.shards.paths
        }

    def require_nothing_wrong(self) -> None:
        """What must hold after any interruption."""
        assert not self.dest.exists() or self.dest.read_bytes() == self.shards.merged
        if self.method is Method.COPY:
            assert self._snapshot() == self.sources

    def require_finished(self) -> None:
        assert self.dest.read_bytes() == self.shards.merged
        assert {path.name for path in self.dest.parent.iterdir()} == {
            self.dest.name, manifest_path(self.dest).name,
        }  # fmt: skip
        if self.method is Method.COPY:
            assert self._snapshot() == self.sources
        else:
            assert not any(path.exists() for path in self.shards.paths)
        assert system.marked(self.dest) == ("", 0)
        assert self.merge().action == "unchanged"  # type: ignore[attr-defined]


@pytest.fixture(params=[Method.COPY, Method.IN_PLACE])
def new_box(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Box]:
    monkeypatch.setattr(copy, "BLOCK", 200)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # none of these tests outlives a real crash
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    boxes = iter(range(10_000))
    return lambda: Box(tmp_path / str(next(boxes)), request.param)


def test_a_kill_at_every_call(new_box: Callable[[], Box], tmp_path: Path) -> None:
    total = count_calls(new_box().merge, tmp_path / "tally")
    assert total > 40  # calls that change something
    for number in range(0, total, STRIDE):
        box = new_box()
        assert in_a_child(box.merge, lambda n=number: stop_at(n)) == -9, number
        box.require_nothing_wrong()
        box.merge()
        box.require_finished()


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
def test_kills_at_random_points_one_after_the_other(
    new_box: Callable[[], Box], tmp_path: Path, power: bool
) -> None:
    dice = random.Random(5)  # noqa: S311 - repeatable
    kills = 0
    while kills < KILLS:
        box, attic = new_box(), tmp_path / f"attic{kills}"
        status = None
        while status != FINISHED:
            number = dice.randrange(60)
            loss = Power(attic, random.Random(kills)) if power else None  # noqa: S311
            status = in_a_child(box.merge, lambda n=number, p=loss, b=box: stop_at(n, p, b.folder))
            assert status in (FINISHED, -9), (kills, number)
            kills += status == -9
            box.require_nothing_wrong()
        box.require_finished()


def test_what_was_done_is_not_done_again(new_box: Callable[[], Box]) -> None:
    box = new_box()
    assert in_a_child(box.merge, lambda: stop_at(45)) == -9
    position = json.loads(journal_path(box.dest).read_text())["position"]
    assert position >= EPOCH
    result = box.merge()
    assert result.resumed == position  # type: ignore[attr-defined]
    box.require_finished()


def test_damage_of_the_unfinished_result_is_noticed(new_box: Callable[[], Box]) -> None:
    box = new_box()
    assert in_a_child(box.merge, lambda: stop_at(45)) == -9
    with partial_path(box.dest).open("rb+") as stream:
        os.pwrite(stream.fileno(), b"\xff", 100)
    if box.method is Method.COPY:
        assert box.merge().resumed == 0  # type: ignore[attr-defined]
        box.require_finished()
    else:
        with pytest.raises(GpuboxError, match="not those that were written"):
            box.merge()
        assert not box.dest.exists()
        assert partial_path(box.dest).exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "other"}', "\0"])
def test_a_journal_that_says_nothing_is_no_journal(new_box: Callable[[], Box], text: str) -> None:
    box = new_box()
    assert in_a_child(box.merge, lambda: stop_at(45)) == -9
    journal_path(box.dest).write_text(text)
    if box.method is Method.COPY:
        assert box.merge().resumed == 0  # type: ignore[attr-defined]
        box.require_finished()
    else:  # content of the shards is in the unfinished result only, and nothing says where
        with pytest.raises(GpuboxError, match="took content from it"):
            box.merge()
        assert partial_path(box.dest).exists()


def test_a_journal_of_other_shards_is_not_gone_on_with(new_box: Callable[[], Box]) -> None:
    box = new_box()
    assert in_a_child(box.merge, lambda: stop_at(45)) == -9
    if box.method is Method.COPY:
        os.utime(box.shards.paths[0], ns=(1, 1))
        box.sources = box._snapshot()
        assert box.merge().resumed == 0  # type: ignore[attr-defined]
        box.require_finished()
        return
    for path in box.shards.paths:
        path.unlink()
    again = shard_set(box.folder / "shards")  # fetched again
    with pytest.raises(GpuboxError, match="unfinished merge in place"):
        box.merge()
    with pytest.raises(GpuboxError, match="took from its shards"):
        merge(again.paths[0], box.dest)
    partial_path(box.dest).unlink()
    journal_path(box.dest).unlink()
    box.merge()
    box.require_finished()


def test_an_unfinished_merge_in_place_is_not_a_source_of_zeros(
    new_box: Callable[[], Box],
) -> None:
    box = new_box()
    if box.method is Method.COPY:
        pytest.skip("takes nothing from its shards")
    assert in_a_child(box.merge, lambda: stop_at(45)) == -9
    elsewhere = box.folder / "elsewhere.gguf"
    with pytest.raises(GpuboxError, match="took content from it"):
        merge(box.shards.paths[0], elsewhere)
    with pytest.raises(GpuboxError, match="took content from it"):
        merge(box.shards.paths[0], box.dest)
    assert not elsewhere.exists()
    box.merge()
    box.require_finished()


@pytest.mark.parametrize("room", [600, 1500, 3000])
def test_a_full_disk_midway_is_gone_on_from(new_box: Callable[[], Box], room: int) -> None:
    """A limit on the size of files stands for the full disk: the kernel fails the same call."""
    box = new_box()

    def fill() -> None:
        system.preallocate = lambda *_: None
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))

    assert in_a_child(box.merge, fill) == FAILED
    box.require_nothing_wrong()
    result = box.merge()
    assert result.resumed == room // EPOCH * EPOCH  # type: ignore[attr-defined]
    box.require_finished()


def refuse(first: int, last: int) -> None:
    """Let the calls ``first`` to ``last`` of those that need space fail, in this process.

    Half of a write fits before.
    """
    count = itertools.count()

    def wrap(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*given: Any) -> object:
            number = next(count)
            if first <= number <= last:
                if name == "write" and number == first and len(given[1]) > 1:
                    return call(given[0], bytes(given[1][: len(given[1]) // 2]), given[2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*given)

        return wrapped

    for name in ("write", "preallocate", "sync_data", "sync", "rename", "mark"):
        setattr(system, name, wrap(name, getattr(system, name)))


def test_no_space_at_every_call(new_box: Callable[[], Box], tmp_path: Path) -> None:
    """The calls that need space are refused, one in each run, as a full disk would."""
    total = count_calls(new_box().merge, tmp_path / "tally")
    for number in range(0, total, STRIDE):
        box = new_box()
        assert in_a_child(box.merge, lambda n=number: refuse(n, n + 1)) in (FAILED, FINISHED)
        box.require_nothing_wrong()
        box.merge()
        box.require_finished()


def test_a_disk_that_is_full_from_a_random_point_on(new_box: Callable[[], Box]) -> None:
    """One run after the other, until space was made."""
    dice = random.Random(7)  # noqa: S311 - repeatable
    failures = 0
    while failures < KILLS:
        box = new_box()
        for _ in range(dice.randrange(1, 4)):
            number = dice.randrange(60)
            status = in_a_child(box.merge, lambda n=number: refuse(n, 1 << 30))
            assert status in (FAILED, FINISHED), number
            failures += status == FAILED
            box.require_nothing_wrong()
            if status == FINISHED:
                break
        box.merge()
        box.require_finished()
