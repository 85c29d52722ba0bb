# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from gpubox import release


def test_digest_knows_values_and_not_the_order_of_keys() -> None:
    assert release.digest({"a": 1, "b": [1, 2]}) == release.digest({"b": [1, 2], "a": 1})
    assert release.digest({"a": [1, 2]}) != release.digest({"a": [2, 1]})
    assert len(release.digest({})) == release.DIGEST_LENGTH


def test_publish_replaces_the_whole(tmp_path: Path) -> None:
    target = tmp_path / "patches"
    release.publish(target, {"a/one": "1", "two": "2"})
    release.publish(target, {"a/one": "changed"})
    assert sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()) == [
        "a/one"
    ]
    assert release.read_files(target, {"a/one": "", "two": ""}) == {"a/one": "changed"}
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_failed_publish_leaves_the_old_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "patches"
    release.publish(target, {"one": "1"})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(release, "write_atomically", fail)
    with pytest.raises(OSError, match="disk full"):
        release.publish(target, {"one": "2"})
    assert (target / "one").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["patches"]


def test_write_atomically_leaves_no_temporary_file(tmp_path: Path) -> None:
    release.write_atomically(tmp_path / "x", "text", mode=0o600)
    assert (tmp_path / "x").read_text() == "text"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 1
