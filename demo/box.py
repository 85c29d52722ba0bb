# SPDX-License-Identifier: Apache-2.0
"""A system container treated like a machine: made, started again, told from foreign ones."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubox.errors import GpuboxError

from . import host, settings
from .console import Console
from .engine import Podman
from .image import MADE_LABEL

SPEC_LABEL = "gpubox.spec"
CACHE_VOLUME = "gpubox-cache"
BOX_PORT = 18000  # see system_image/gpubox-demo-port.socket
LEFTOVERS = Path(__file__).resolve().parent / "leftovers.py"
BOOT_LIMIT = 90.0  # seconds until systemd must have finished booting
# What root of a real machine can do and the box's units and checks need: mount namespaces for
# PrivateTmp= and its like, and to see which process of another user holds a socket.
CAPABILITIES = ("SYS_ADMIN", "SYS_PTRACE")


@dataclass(frozen=True)
class Spec:
    """Everything that decides how a container is made."""

    name: str
    image: str  # id, not name: a rebuilt image is another one
    mounts: tuple[str, ...]
    port: int | None  # on the host's loopback
    variables: tuple[tuple[str, str], ...]

    def _decisive(self) -> list[str]:
        published = [f"--publish=127.0.0.1:{self.port}:{BOX_PORT}"] if self.port else []
        return [
            f"--name={self.name}",
            f"--hostname={self.name}",
            f"--label={MADE_LABEL}=true",
            "--systemd=always",
            *(f"--cap-add={name}" for name in CAPABILITIES),
            "--security-opt=label=disable",  # mounts keep the host's SELinux labels
            "--shm-size=1g",  # ranks of one server talk through shared memory
            "--stop-timeout=30",
            *published,
            *(f"--volume={mount}" for mount in self.mounts),
        ]

    def digest(self) -> str:
        """Changes when the container must be made anew.

        The variables are left out: they are defaults for commands in the box, and a run from a
        shell with another mirror must not cost the box.
        """
        return settings.fingerprint(
            {"arguments": "\0".join([*self._decisive(), self.image]).encode()}
        )

    def arguments(self) -> list[str]:
        """Arguments of ``podman create``."""
        return [
            *self._decisive(),
            f"--label={SPEC_LABEL}={self.digest()}",
            *(f"--env={name}={value}" for name, value in self.variables),
            self.image,
        ]


def spec(name: str, image: str, chosen: settings.Settings, port: int | None) -> Spec:
    """How a box is made with these settings."""
    mounts = [f"{CACHE_VOLUME}:{settings.CACHE_IN_BOX}"]
    if chosen.wheelhouse is not None:
        mounts.append(f"{chosen.wheelhouse}:{settings.WHEELHOUSE_IN_BOX}:ro")
    if chosen.ca_bundle is not None:
        mounts.append(f"{chosen.ca_bundle}:{settings.CA_BUNDLE_IN_BOX}:ro")
    variables = tuple(sorted(chosen.package_environment.items()))
    return Spec(name, image, tuple(mounts), port, variables)


def inspect(podman: Podman, name: str) -> dict[str, Any] | None:
    """What podman knows about a container, or None when there is none of that name."""
    outcome = podman.run("container", "inspect", name)
    if outcome.code != 0:
        return None
    found: dict[str, Any] = json.loads(outcome.output)[0]
    return found


def require_ours(name: str, found: dict[str, Any]) -> None:
    """Refuse a container that something else made.

    Our image hands ``gpubox.demo`` on to every container made of it, by anybody; only ours have the
    digest of their specification too.

    Raises:
        GpuboxError: it lacks one of our labels.
    """
    labels = found["Config"].get("Labels") or {}
    if labels.get(MADE_LABEL) != "true" or SPEC_LABEL not in labels:
        raise GpuboxError(
            f"a container named {name} exists that gpubox did not make"
            f" (image {found.get('ImageName') or found.get('Image')},"
            f" not both labels {MADE_LABEL} and {SPEC_LABEL})",
            "that name free, or a container with our labels",
            f"rename it (`podman rename {name} OTHER`) or remove it yourself, then repeat",
        )


def decide(found: dict[str, Any] | None, wanted: Spec) -> str:
    """What must happen to have the wanted box: ``create``, ``recreate``, ``start`` or ``keep``."""
    if found is None:
        return "create"
    if (found["Config"].get("Labels") or {}).get(SPEC_LABEL) != wanted.digest():
        return "recreate"
    status = found["State"]["Status"]
    if status == "running":
        return "keep"
    if status in ("created", "configured", "exited", "stopped", "initialized"):
        return "start"
    return "recreate"  # removing, paused, dead, unknown: nothing to build on


def _boot(podman: Podman, name: str) -> None:
    """Wait until systemd in the box has finished booting.

    Raises:
        GpuboxError: it has not within the limit.
    """
    deadline = time.monotonic() + BOOT_LIMIT
    said = "nothing"
    while time.monotonic() < deadline:
        outcome = podman.inside(name, "systemctl", "is-system-running")
        said = outcome.output.strip() or outcome.tail(2)
        # degraded: some unit failed. Which units must run is for the site playbook to say.
        if said in ("running", "degraded"):
            return
        time.sleep(0.3)
    raise GpuboxError(
        f"systemd in {name} says {said!r} after {BOOT_LIMIT:.0f} s",
        "a booted system (running or degraded)",
        f"see `podman logs {name}`; `make demo-down` removes it, then repeat",
    )


def ensure(podman: Podman, wanted: Spec, console: Console) -> str:
    """Have the wanted box running; what had to be done (see ``decide``).

    Raises:
        GpuboxError: the name belongs to a foreign container, the port is taken, or it won't boot.
    """
    name = wanted.name
    found = inspect(podman, name)
    if found is not None:
        require_ours(name, found)
    action = decide(found, wanted)
    if action == "keep" and podman.inside(name, "true").code != 0:
        # its processes are gone, podman has not noticed, and will not start it again
        action = "recreate"
    if action == "keep":
        return action
    with console.step(f"{action} the system container {name}"):
        if action == "recreate":
            podman.must(
                *("rm", "--force", "--time=10", name),
                wanted=f"the outdated container {name} removed",
                remedy="remove it with `podman rm --force`, then repeat",
            )
        if wanted.port is not None:
            host.require_free_port(wanted.port)
        if action != "start":
            podman.must(
                *("create", *wanted.arguments()),
                wanted=f"the container {name}",
                remedy="correct what podman says, then repeat",
            )
        podman.must(
            *("start", name),
            wanted=f"the container {name} running",
            remedy="correct what podman says; `make demo-down` removes the container",
        )
        _boot(podman, name)
    return action


def end_leftovers(podman: Podman, name: str) -> int:
    """End Ansible modules that an interrupted run left in the box; how many processes they were."""
    outcome = podman.inside(name, "python3", "-c", LEFTOVERS.read_text(encoding="utf-8"))
    return int(outcome.output.strip() or 0) if outcome.code == 0 else 0


def remove(podman: Podman, name: str) -> bool:
    """Remove our container; whether there was one.

    Raises:
        GpuboxError: the container of that name is not ours, or it can't be removed.
    """
    found = inspect(podman, name)
    if found is None:
        return False
    require_ours(name, found)
    podman.must(
        *("rm", "--force", "--time=10", name),
        wanted=f"the container {name} removed",
        remedy="correct what podman says, then repeat",
    )
    return True
