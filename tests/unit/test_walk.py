# SPDX-License-Identifier: Apache-2.0
"""The way to a file, through links, and asked as somebody else."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from gpubox import walk
from gpubox.walk import (
    NOBODY,
    Account,
    account_of,
    components,
    described,
    first_denied,
    hidden,
    is_directory,
    is_file,
    sizes,
    unreachable,
)
from hypothesis import given
from hypothesis import strategies as st


def below(path: Path, root: Path) -> list[str]:
    return [str(one.relative_to(root)) for one in components(path) if one.is_relative_to(root)]


def test_every_link_is_walked(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/python").write_text("")
    (tmp_path / "a/b/relative").symlink_to("../../c/python")
    (tmp_path / "a/b/absolute").symlink_to(tmp_path / "a/b/relative")
    expected = [".", "a", "a/b", "c", "c/python"]
    assert below(tmp_path / "a/b/relative", tmp_path) == expected
    assert below(tmp_path / "a/b/absolute", tmp_path) == expected
    assert below(tmp_path / "a/none/deeper", tmp_path) == [".", "a"]
    (tmp_path / "round").symlink_to("round")
    assert below(tmp_path / "round", tmp_path) == ["."]
    assert components(tmp_path)[0] == Path("/")


PATHS = st.lists(
    st.sampled_from(["a", "..", "link", "round", "a" * 256, "\0", "\udcff", "\ud800", "é" * 128]),
    max_size=20,
)


@given(PATHS)
def test_no_path_breaks_it(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    folder = tmp_path_factory.getbasetemp() / "walked"
    (folder / "a").mkdir(parents=True, exist_ok=True)
    for name, target in (("link", "a" * 300), ("round", "round")):
        if not (folder / name).is_symlink():
            with contextlib.suppress(OSError):  # some file systems take no such target
                (folder / name).symlink_to(target)
    path = folder.joinpath(*names)
    assert components(path)[0] == Path("/")
    described(path)
    hidden(path)
    assert sizes(path) == {} or is_directory(path)
    assert not is_file(path)
    assert not (unreachable([path]) and is_directory(path))


def test_what_cannot_be_looked_at_is_told(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "file").write_text("12345")
    long, within = tmp_path / ("a" * 256), tmp_path / "file/x"
    assert unreachable([tmp_path, tmp_path / "none", within, long, tmp_path / "round"]) == {
        str(long): "File name too long",
        str(tmp_path / "round"): "Too many levels of symbolic links",
    }
    assert sizes(tmp_path) == {"file": 5}
    assert sizes(tmp_path / "file") == {}


def test_accounts() -> None:
    assert account_of("root").uid == 0
    assert account_of("nobody-has-this-name") == Account(NOBODY, NOBODY)


def test_what_the_unit_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "HIDDEN", (str(tmp_path / "home"),))
    (tmp_path / "home/me").mkdir(parents=True)
    (tmp_path / "homely").mkdir()
    (tmp_path / "models").symlink_to("home/me")
    assert hidden(tmp_path / "models/m.gguf") == str(tmp_path / "home")
    assert hidden(tmp_path / "homely/m.gguf") is None


def test_a_place_is_described(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    assert described(tmp_path) == f"{tmp_path} (mode 0750, owner {os.getuid()}:{os.getgid()})"
    assert described(tmp_path / "none") == str(tmp_path / "none")


@pytest.mark.forks
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_the_kernel_is_asked_as_the_user(tmp_path: Path) -> None:
    for one in (tmp_path, *tmp_path.parents):
        if one.stat().st_mode & 0o001 == 0:
            one.chmod(one.stat().st_mode | 0o011)
    private, model = tmp_path / "private", tmp_path / "model.gguf"
    private.mkdir(mode=0o700)
    (private / "python").write_text("")
    (private / "python").chmod(0o755)
    model.write_text("")
    model.chmod(0o644)
    (tmp_path / "python").symlink_to("private/python")
    ways = {tmp_path / "python": os.X_OK, model: os.R_OK}
    stopped = {str(tmp_path / "python"): str(private)}
    assert first_denied(ways, Account(NOBODY, NOBODY)) == stopped
    assert first_denied(ways, Account(0, 0)) == {}
    private.chmod(0o711)
    assert first_denied(ways, Account(NOBODY, NOBODY)) == {}
    (private / "python").chmod(0o700)
    stopped = {str(tmp_path / "python"): str(private / "python")}
    assert first_denied(ways, Account(NOBODY, NOBODY)) == stopped
    os.chown(private / "python", 0, 4711)
    (private / "python").chmod(0o750)
    assert first_denied(ways, Account(NOBODY, NOBODY, (4711,))) == {}
    assert os.geteuid() == 0


@pytest.mark.forks
def test_who_may_not_become_another_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setuid", refuse)
    assert first_denied({Path("/"): os.X_OK}, Account(NOBODY, NOBODY)) is None
