# SPDX-License-Identifier: Apache-2.0
"""From a recorded box over its facts and its plan to the one verdict, as the site does it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpubox.gguf_merge import Method, Options, bytes_held, merge, system
from gpubox.gguf_merge.files import partial_path
from gpubox.hardware import Box
from gpubox.preflight import GIB
from gpubox.serving_plan import plan
from gpubox.stack import load_stack

from tests import boxes
from tests.unit.gguf_files import TENSORS, shard_set
from tests.unit.modules import run

ROOT = Path(__file__).resolve().parents[2]
STACK = load_stack("glm5-cu130", ROOT)
PATHS = ["/opt/gpubox", "/var/cache/vllm-glm5", "/shared/glm5-gguf", "/dev/shm"]  # noqa: S108

# whoever asks the kernel as another user copies the process
pytestmark = pytest.mark.forks


def verdict(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    written: bool = True,
    **changed: Any,
) -> dict[str, Any]:
    root, stand_ins = boxes.unpack(name, tmp_path / "box")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(stand_ins))
        hardware = Box(
            root, paths=PATHS, packages=[*STACK["system_packages"], "python3-venv"]
        ).facts()
    planned = plan(hardware, None, STACK, {})
    arguments = {
        "hardware": hardware,
        "device": "cuda" if hardware["nvidia_devices"]["value"] else "cpu",
        "stack": STACK["name"],
        "stack_device": STACK["device"],
        "driver": STACK["driver"],
        "toolkits": STACK["toolkits"],
        "torch_cuda": STACK["torch_cuda"],
        "environment": "/opt/gpubox/environments/0123456789abcdef",
        "cache": "/var/cache/vllm-glm5",
        "plan_faults": planned.faults,
        "ranks": planned.tensor_parallel_size,
        "tensor_parallel_size": planned.tensor_parallel_size,
        "max_model_len": planned.max_model_len or 0,
        "options": STACK["serve"]["options"],
        "quantization_types": STACK["quantization_types"],
        "model_source": "",
        "fetch_bytes": 0,
        "model": "/shared/glm5-gguf/GLM-5.gguf",
        "user": "vllm",
        "unit": "vllm-glm5.service",
        "port": 8000,
        "root": str(root),
        "report": str(tmp_path / "log/preflight.json"),
        **changed,
    }
    # no systemctl: nothing of the machine that the tests run on
    monkeypatch.setenv("PATH", str(stand_ins))
    answer = run("preflight", arguments, capsys)
    report = tmp_path / "log/preflight.json"
    if written and not changed.get("_ansible_check_mode"):
        content = json.loads(report.read_text())
        assert content["passed"] == answer["passed"]
        assert content["findings"] == answer["findings"]
        assert content["stack"] == "glm5-cu130"
    else:
        assert not report.exists()
    return answer


NO_MODEL = "gguf_model_source is not set, and there is no /shared/glm5-gguf/GLM-5.gguf"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reference-8", []),
        ("reference-2", []),
        ("shuffled", []),
        ("less-memory", []),
        ("two-domains", []),
        ("max-q", []),
        ("h200-8", []),
        (
            "seven",
            [
                (
                    "card 0000:ac:00.0: it has fallen off the bus (rev ff) (Unable to determine "
                    "the device handle for GPU5: 0000:AC:00.0: Unknown Error; GPU at "
                    "PCI:0000:ac:00: GPU-00000000-0000-0000-0000-0000000ac000; Xid "
                    "(PCI:0000:ac:00): 79, GPU has fallen off the bus.)"
                )
            ],
        ),
        ("workstation-1", ["PID 2211 (/usr/bin/gnome-shell) holds 310 MiB of card 0000:01:00.0"]),
        (
            "mig",
            [
                "card 0000:16:00.0 has MIG enabled",
                "card 0000:27:00.0: MIG is disabled and enabled after a reset",
                "card 0000:27:00.0: ECC is disabled and enabled after a reset",
            ],
        ),
        (
            "no-driver",
            [
                "nouveau is loaded and holds the cards",
                (
                    "the IOMMU translates the addresses of the cards, and 8 bridges redirect "
                    "requests (ACS), the first is 0000:15:01.0"
                ),
                "no NVIDIA driver is loaded (no driver library is installed as a package)",
                "no nvcc of CUDA 13.1, 13.0 below /usr/local; there is none",
            ],
        ),
        (
            "driver-mismatch",
            [
                "kernel module 590.44.01 is loaded, libraries 590.48.01 are installed",
                (
                    "libnvidia-compute, nvidia-dkms-open, nvidia-open may be upgraded; unattended "
                    "upgrades are on"
                ),
            ],
        ),
        (
            "bmc-vga",
            [
                "no NVIDIA device",
                "no nvcc of CUDA 13.1, 13.0 below /usr/local; there is none",
                "no usable NVIDIA card",
            ],
        ),
        (
            "container",
            [
                "no NVIDIA device",
                "no nvcc of CUDA 13.1, 13.0 below /usr/local; there is none",
                "no usable NVIDIA card",
            ],
        ),
    ],
)
def test_the_verdict_of_each_box(
    name: str,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = verdict(name, tmp_path, monkeypatch, capsys)
    said = [finding["measured"] for finding in answer["findings"]]
    assert said.count(NO_MODEL) == 1
    said.remove(NO_MODEL)
    if os.geteuid() != 0:  # only root may ask as somebody else
        said = [text for text in said if "could not be tried as user" not in text]
    assert sorted(said) == sorted(expected)
    assert not answer["passed"]


def test_every_box_is_judged() -> None:
    (mark,) = [m for m in test_the_verdict_of_each_box.pytestmark if m.name == "parametrize"]
    assert sorted(case[0] for case in mark.args[1]) == boxes.names()


def test_a_report_of_check_mode_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict("reference-8", tmp_path, monkeypatch, capsys, _ansible_check_mode=True)


def test_the_verdict_is_told_where_no_report_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "log"
    report.write_text("")
    answer = verdict(
        "seven", tmp_path, monkeypatch, capsys, report=f"{report}/preflight.json", written=False
    )
    said = {one["check"]: one for one in answer["findings"]}
    assert said["report"]["severity"] == "warning"
    assert said["report"]["measured"].startswith(str(report))
    assert "rev ff" in said["plan"]["measured"]


def test_shards_merger_and_environment_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = 700 * 1024**3
    shard = "/shared/glm5-gguf/sets/0123456789abcdef/M-00001-of-00003.gguf"
    answer = verdict(
        "workstation-1",  # one file system of 2000 GB free for everything
        tmp_path,
        monkeypatch,
        capsys,
        model_source=shard,
        fetch_bytes=size,
        hardware=with_places(tmp_path, shard),
    )
    (space,) = [one for one in answer["findings"] if one["check"] == "space"]
    assert "16.0 for the environment" in space["wanted"]
    assert "700.0 for the shards" in space["wanted"]
    assert "700.0 for the merged model" in space["wanted"]


@pytest.mark.parametrize(("method", "told"), [("in_place", "1.0"), ("reflink", "2.0")])
def test_a_merge_that_needs_no_second_copy_is_not_refused_for_its_space(
    method: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shard = "/shared/glm5-gguf/sets/0123456789abcdef/M-00001-of-00003.gguf"
    answers = {
        size: verdict(
            "workstation-1",  # one file system of 10**12 bytes free for everything
            tmp_path / str(size),
            monkeypatch,
            capsys,
            model_source=shard,
            fetch_bytes=size * 1024**3,
            merge_method=method,
            hardware=with_places(tmp_path / f"{size} places", shard),
        )
        for size in (700, 1000)
    }
    fits, larger = (
        [one for one in answer["findings"] if one["check"] == "space"]
        for answer in answers.values()
    )
    assert fits == []
    assert f"{told} for the merged model" in larger[0]["wanted"]


def test_a_merge_that_was_interrupted_is_not_refused_for_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    big = replace(TENSORS[0], dimensions=(1024, 4096))  # 16 MiB
    shards = shard_set(tmp_path / "shards", (1,), (big, replace(big, name="big2.weight")))
    model = tmp_path / "out/M.gguf"
    model.parent.mkdir()
    size = sum(path.stat().st_size for path in shards.paths)

    def space(method: str, free: int) -> list[str]:
        answer = verdict(
            "workstation-1",
            tmp_path,
            monkeypatch,
            capsys,
            model_source=str(shards.paths[0]),
            model=str(model),
            merge_method=method,
            hardware=with_places(tmp_path, str(model), "/opt/gpubox", free=free),
            environment=str(built),
        )
        return [one["wanted"] for one in answer["findings"] if one["check"] == "space"]

    built = tmp_path / "environments/0"
    built.mkdir(parents=True)
    (built / "environment.json").write_text("{}")
    for method in ("copy", "in_place"):
        assert space(method, GIB + size) == []
        assert space(method, GIB + size - (1 << 20)) != []

    # a copy has the blocks of its whole result from its beginning on
    partial_path(model).write_bytes(bytes(size))
    assert space("copy", GIB) == []
    partial_path(model).unlink()

    real, left = system.punch, [3]

    def stopped(*given: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        real(*given)

    options = Options(Method.IN_PLACE, epoch=size // 3)
    with monkeypatch.context() as patch:
        patch.setattr(system, "punch", stopped)
        with pytest.raises(KeyboardInterrupt):
            merge(shards.paths[0], model, options=options)
    held = bytes_held(Method.IN_PLACE, model, shards.paths)
    assert held > size // 4
    # what was not fetched is the environment's; the set is not fetched again for its holes
    assert space("in_place", GIB + size - held) == []
    assert space("in_place", GIB + size - held - (1 << 20)) != []


def test_another_set_than_the_one_that_is_served_is_judged_before_it_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = shard_set(tmp_path / "old", (3,)), shard_set(tmp_path / "new", (2, 4))
    model = tmp_path / "out/M.gguf"
    model.parent.mkdir()
    merge(old.paths[0], model)

    def said(source: Path | str) -> str:
        answer = verdict(
            "workstation-1",
            tmp_path,
            monkeypatch,
            capsys,
            model_source=str(source),
            model=str(model),
        )
        return " ".join(one["measured"] for one in answer["findings"] if one["check"] == "model")

    not_of_it = f"{model} was not made of its set"
    for path in old.paths:
        path.unlink()
    for source in (old.paths[0], ""):  # what is served, though its shards are gone
        assert not_of_it not in said(source)
    new.paths[1].unlink()
    assert f"{new.paths[1]}: missing" in said(new.paths[0])
    new.paths[0].unlink()
    assert not_of_it in said(new.paths[0])


@pytest.mark.parametrize(
    "name", ["m" * 300 + ".gguf", "closed/m.gguf", "round/m.gguf", "x/" * 2500 + "m.gguf"]
)
def test_a_path_that_cannot_be_looked_at_is_a_finding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "round").symlink_to("round")
    path = f"{tmp_path}/{name}"
    if name.startswith("closed"):  # root may look everywhere, but not as a client of NFS
        monkeypatch.setattr(Path, "stat", refusing(Path.stat))
        monkeypatch.setattr(Path, "lstat", refusing(Path.lstat))
    answer = verdict("reference-8", tmp_path, monkeypatch, capsys, model=path, model_source=path)
    said = [one["measured"] for one in answer["findings"] if one["check"] == "path"]
    assert len(said) == 1
    assert said[0].startswith(f"{path}: ")


def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
    def ask(path: Path, *given: Any, **named: Any) -> Any:
        if "closed" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *given, **named)

    return ask


def with_places(tmp_path: Path, *paths: str, free: int = 10**12) -> dict[str, Any]:
    """Facts of the workstation, all paths on its one file system."""
    place = {"mount": "/", "number": "0:28", "free_bytes": free}
    root, _ = boxes.unpack("workstation-1", tmp_path / "places")
    facts = Box(root).facts()
    every = dict.fromkeys([*PATHS, "/shared/glm5-gguf/GLM-5.gguf", *paths], place)
    return facts | {"paths": {"value": every, "unknown": None, "source": "the test"}}


@pytest.mark.parametrize("content", ["[", "[]", "\ufeff{}", "[" * 100_000])
def test_a_damaged_config_json_is_a_finding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
) -> None:
    shards = shard_set(tmp_path / "shards")
    (tmp_path / "shards/config.json").write_text(content, encoding="utf-8")
    answer = verdict(
        "reference-8", tmp_path, monkeypatch, capsys, model_source=str(shards.paths[0])
    )
    said = [finding["measured"] for finding in answer["findings"]]
    assert any(text.startswith(f"{tmp_path}/shards/config.json: ") for text in said)
