# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from gpubox.errors import GpuboxError

from demo import engine, host
from demo.engine import Podman
from tests.unit.demo_stand_ins import on_path
from tests.unit.test_demo_host import CI, LAPTOP


def test_missing_podman_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path(monkeypatch, tmp_path, only=True)
    with pytest.raises(GpuboxError) as caught:
        Podman.here(tmp_path)
    assert caught.value.measured == "there is no podman on PATH"
    assert "make setup" in caught.value.remedy


@pytest.mark.parametrize(
    ("answer", "measured"),
    [
        ((0, "3.4.4\n", ""), "podman is version 3.4.4"),
        ((125, "", "cannot re-exec process"), "cannot re-exec process"),
    ],
)
def test_podman_that_cannot_serve_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: tuple[int, str, str], measured: str
) -> None:
    on_path(monkeypatch, tmp_path, "podman")["podman"].answer({"version": answer})
    with pytest.raises(GpuboxError) as caught:
        Podman.here(tmp_path)
    assert measured in caught.value.measured


def test_a_usable_podman_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path(monkeypatch, tmp_path, "podman")["podman"].answer({"version": (0, "4.3.1\n", "")})
    assert isinstance(Podman.here(tmp_path), Podman)


def test_configuration_is_written_only_where_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CONTAINERS_CONF", raising=False)
    assert engine.environment(tmp_path, LAPTOP) == {}
    assert list(tmp_path.iterdir()) == []
    variables = engine.environment(tmp_path, CI)
    written = Path(variables["CONTAINERS_CONF"])
    assert written.read_text() == host.containers_conf(CI)
    assert [path.name for path in written.parent.iterdir()] == ["containers.conf"]
    monkeypatch.setenv("CONTAINERS_CONF", "/home/me/containers.conf")
    assert engine.environment(tmp_path, CI) == {}


def test_a_failed_command_shows_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path(monkeypatch, tmp_path, "podman")["podman"].answer({"start": (125, "", "no space left")})
    with pytest.raises(GpuboxError) as caught:
        Podman({}).must("start", "box", wanted="the box running", remedy="free some space")
    assert caught.value.measured == "`podman start` ended with 125:\nno space left"
