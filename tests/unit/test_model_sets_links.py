# SPDX-License-Identifier: Apache-2.0
"""What is in use through links is not removed with the sets that nobody needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpubox.mirror import read_record, surplus

NAME = "GLM-5.gguf"


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    for name in ("a" * 16, "b" * 16):
        folder = tmp_path / "sets" / name
        folder.mkdir(parents=True)
        (folder / NAME).write_bytes(b"GGUF")
    return tmp_path / "sets"


def test_a_shard_that_the_served_file_leads_to_stays(sets: Path, tmp_path: Path) -> None:
    shard, merged = sets / ("a" * 16) / NAME, tmp_path / NAME
    merged.symlink_to(shard)
    assert surplus(sets, shard, "none", merged) == [sets / ("b" * 16)]
    merged.unlink()
    merged.write_bytes(b"GGUF")
    assert surplus(sets, shard, "none", merged) == [shard, sets / ("b" * 16)]


@pytest.mark.parametrize("keep", ["current", "none"])
def test_a_set_that_is_in_use_through_a_link_stays(sets: Path, tmp_path: Path, keep: str) -> None:
    old, new = sets / ("b" * 16), sets / ("a" * 16)
    (new / NAME).unlink()
    (new / NAME).symlink_to(old / NAME)
    (old / NAME).unlink()
    (old / NAME).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"GGUF")
    assert old not in surplus(sets, new / NAME, keep, None)


def test_a_shard_below_a_set_keeps_the_set(sets: Path) -> None:
    folder = sets / ("b" * 16) / "Q4"
    folder.mkdir()
    (folder / NAME).write_bytes(b"GGUF")
    assert surplus(sets, folder / NAME, "current", None) == [sets / ("a" * 16)]


def test_notes_that_are_nested_too_deeply_are_none(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text("[" * 100_000)
    assert read_record(record) == {}
