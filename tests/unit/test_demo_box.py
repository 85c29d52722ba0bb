# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpubox.errors import GpuboxError

from demo import box, leftovers, settings
from demo.box import Spec
from demo.console import Console
from demo.engine import Podman
from tests.unit.demo_stand_ins import StandIn, on_path

WANTED = Spec("gpubox-demo", "sha256:1", ("gpubox-cache:/var/cache/gpubox",), None, ())


def container(status: str, spec: Spec | None = WANTED) -> dict[str, Any]:
    """What `podman container inspect` says, as far as it is read."""
    labels = {} if spec is None else {"gpubox.demo": "true", "gpubox.spec": spec.digest()}
    return {"Config": {"Labels": labels}, "State": {"Status": status}, "ImageName": "debian"}


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    return on_path(monkeypatch, tmp_path, "podman")["podman"]


def verbs(stand_in: StandIn) -> list[str]:
    return [call[0] for call in stand_in.calls() if call[:1] not in (["container"], ["exec"])]


RUNNING = {
    "exec gpubox-demo systemctl": (0, "running\n", ""),
    "exec gpubox-demo true": (0, "", ""),
}
WORKS = {"create": (0, "id\n", ""), "start": (0, "\n", ""), "rm": (0, "\n", ""), **RUNNING}


def ensure(stand_in: StandIn, found: dict[str, Any] | None, wanted: Spec = WANTED) -> str:
    known = (125, "", "no such container") if found is None else (0, json.dumps([found]), "")
    stand_in.answer({"container inspect": known, **WORKS})
    return box.ensure(Podman({}), wanted, Console())


def test_a_missing_box_is_created_and_booted(podman: StandIn) -> None:
    assert ensure(podman, None) == "create"
    assert verbs(podman) == ["create", "start"]


def test_a_running_box_is_kept_as_it_is(podman: StandIn) -> None:
    assert ensure(podman, container("running")) == "keep"
    assert verbs(podman) == []


def test_a_box_whose_processes_are_gone_is_made_anew(podman: StandIn) -> None:
    gone = (255, "", "runc: exec failed: cannot exec in a stopped container")
    known = (0, json.dumps([container("running")]), "")
    podman.answer({"container inspect": known, **WORKS, "exec gpubox-demo true": gone})
    assert box.ensure(Podman({}), WANTED, Console()) == "recreate"
    assert verbs(podman) == ["rm", "create", "start"]


@pytest.mark.parametrize("status", ["exited", "created"])
def test_a_stopped_or_half_made_box_is_started(podman: StandIn, status: str) -> None:
    assert ensure(podman, container(status)) == "start"
    assert verbs(podman) == ["start"]


@pytest.mark.parametrize("status", ["removing", "dead", "paused"])
def test_a_broken_box_is_made_anew(podman: StandIn, status: str) -> None:
    assert ensure(podman, container(status)) == "recreate"
    assert verbs(podman) == ["rm", "create", "start"]


def test_a_box_of_another_recipe_is_made_anew(podman: StandIn) -> None:
    assert ensure(podman, container("running"), replace(WANTED, image="sha256:2")) == "recreate"


def test_a_foreign_container_is_not_touched(podman: StandIn) -> None:
    with pytest.raises(GpuboxError) as caught:
        ensure(podman, container("running", None))
    assert "gpubox-demo exists that gpubox did not make" in caught.value.measured
    assert "rename" in caught.value.remedy
    assert verbs(podman) == []
    with pytest.raises(GpuboxError):
        box.remove(Podman({}), "gpubox-demo")
    assert verbs(podman) == []


def test_what_somebody_made_of_our_image_is_not_touched(podman: StandIn) -> None:
    theirs = container("running")
    theirs["Config"]["Labels"] = {"gpubox.demo": "true", "gpubox.recipe": "1"}
    with pytest.raises(GpuboxError, match="did not make"):
        ensure(podman, theirs)
    with pytest.raises(GpuboxError, match="did not make"):
        box.remove(Podman({}), "gpubox-demo")
    assert verbs(podman) == []


def test_a_port_in_use_is_told_before_anything_is_made(podman: StandIn) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(GpuboxError, match=f"port {port}"):
            ensure(podman, None, replace(WANTED, port=port))
    assert verbs(podman) == []


def test_a_box_that_does_not_boot_is_an_error(
    podman: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box, "BOOT_LIMIT", 0.5)
    podman.answer(
        {
            "container inspect": (125, "", "none"),
            **WORKS,
            "exec gpubox-demo systemctl": (1, "starting\n", ""),
        }
    )
    with pytest.raises(GpuboxError, match="starting"):
        box.ensure(Podman({}), WANTED, Console())


def test_a_degraded_box_is_for_the_site_to_mend(podman: StandIn) -> None:
    podman.answer(
        {
            "container inspect": (125, "", "none"),
            **WORKS,
            "exec gpubox-demo systemctl": (1, "degraded\n", ""),
        }
    )
    assert box.ensure(Podman({}), WANTED, Console()) == "create"


def test_variables_do_not_cost_the_box_but_mounts_and_port_do(tmp_path: Path) -> None:
    chosen = settings.read({"PIP_FIND_LINKS": str(tmp_path)}, tmp_path)
    one = box.spec("gpubox-demo", "sha256:1", chosen, 18000)
    assert f"--volume={tmp_path}:/srv/wheelhouse:ro" in one.arguments()
    assert "--publish=127.0.0.1:18000:18000" in one.arguments()
    assert "--env=UV_FIND_LINKS=/srv/wheelhouse" in one.arguments()
    assert one.digest() == replace(one, variables=()).digest()
    assert one.digest() != replace(one, port=18001).digest()
    assert one.digest() != replace(one, mounts=one.mounts[:1]).digest()


def test_what_an_interrupted_playbook_left_is_told_from_the_rest() -> None:
    pipelined = b"/bin/sh\0-c\0echo BECOME-SUCCESS-abc ; /usr/bin/python3\0"
    processes = [
        (1, 1, b"/lib/systemd/systemd\0"),
        (40, 40, b"/opt/gpubox/current/venv/bin/vllm\0serve\0"),
        (50, 50, b"sudo\0-u\0root\0" + pipelined),
        (51, 50, b"/usr/bin/python3\0"),
        (52, 50, b"/opt/gpubox/tools/uv\0pip\0install\0"),
        (60, 60, b"/usr/bin/python3\0/root/.ansible/tmp/AnsiballZ_apt.py\0"),
        (70, 70, b"python3\0-c\0MARKS = (b'AnsiballZ_', b'BECOME-SUCCESS-')\0"),
        (80, 1, b"AnsiballZ_async\0"),
    ]
    assert leftovers.left_over(processes, own_session=70) == [50, 51, 52, 60]


def test_ended_leftovers_are_counted(podman: StandIn) -> None:
    podman.answer({"exec gpubox-demo python3 -c": (0, "4\n", "")})
    assert box.end_leftovers(Podman({}), "gpubox-demo") == 4
    podman.answer({"exec gpubox-demo python3 -c": (1, "", "no python3")})
    assert box.end_leftovers(Podman({}), "gpubox-demo") == 0
