# SPDX-License-Identifier: Apache-2.0
"""The system image: a bare Debian with systemd, from a registry or from Debian's packages."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from gpubox.errors import GpuboxError

from . import commands, lock, settings
from .console import Console
from .engine import Podman

CONTEXT = Path(__file__).resolve().parent / "system_image"
RECIPE_LABEL = "gpubox.recipe"
MADE_LABEL = "gpubox.demo"
_TMPFS = Path("/dev/shm")  # noqa: S108 - a memory file system, used as one
_TMPFS_NEED = 1 << 30  # bytes: a minimal Debian takes a third of it while it is made


def system_image(suite: str) -> str:
    """Name of the system image of a Debian suite."""
    return f"localhost/gpubox-system:{suite}"


def public_base(suite: str) -> str:
    """Name of the public image that it starts from."""
    return f"docker.io/library/debian:{suite}-slim"


def own_base(suite: str) -> str:
    """Name of the base image made here where no registry is reachable."""
    return f"localhost/gpubox-base:{suite}"


def recipe(context: Path = CONTEXT) -> str:
    """Digest of everything that decides what the system image holds."""
    return settings.fingerprint({path.name: path.read_bytes() for path in context.iterdir()})


def debian_mirror(etc_apt: Path) -> str:
    """The mirror that this host's apt takes Debian from, '' when it is no Debian host.

    Reads deb822 files (``URIs:``) and one-line files (``deb URL suite …``).
    """
    lists = etc_apt / "sources.list.d"
    for path in sorted(lists.glob("*.sources")):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] == ["URIs:"] and words[1:] and words[1].rstrip("/").endswith("/debian"):
                return words[1]
    for path in [etc_apt / "sources.list", *sorted(lists.glob("*.list"))]:
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            words = [word for word in line.split() if not word.startswith("[") and "=" not in word]
            if words[:1] == ["deb"] and words[1:] and words[1].rstrip("/").endswith("/debian"):
                return words[1]
    return ""


def labels(podman: Podman, image: str) -> dict[str, str] | None:
    """Labels of an image, or None when there is no such image."""
    outcome = podman.run("image", "inspect", "--format", "{{json .Config.Labels}}", image)
    if outcome.code != 0:
        return None
    return dict(json.loads(outcome.output) or {})


def _make_base(podman: Podman, suite: str, mirror: str, console: Console, refused: str) -> str:
    """Make the base image from Debian's packages."""
    if shutil.which("mmdebstrap") is None:
        raise GpuboxError(
            f"no image registry is reachable ({refused}), and mmdebstrap is not installed",
            f"the public image {public_base(suite)}, or mmdebstrap to make one like it",
            "connect to the network, or run: sudo apt-get install -y mmdebstrap   (then repeat)",
        )
    roomy = _TMPFS.is_dir() and shutil.disk_usage(_TMPFS).free > _TMPFS_NEED
    variables = {"TMPDIR": str(_TMPFS)} if roomy and "TMPDIR" not in os.environ else {}
    made_by = ("mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates")
    imported_by = ("podman", "import", "--quiet", "--change", f"LABEL {MADE_LABEL}=true")
    with console.step(f"no image registry reachable: making Debian {suite} from its packages"):
        made, imported = commands.pipe(
            [*made_by, suite, "-", *([mirror] if mirror else [])],
            [*imported_by, "-", own_base(suite)],
            source_env=variables,
            sink_env=podman.variables,
        )
    if made.code != 0 or imported.code != 0:
        podman.run("rmi", own_base(suite))  # of half an archive
        raise GpuboxError(
            f"mmdebstrap ended with {made.code}, podman import with {imported.code}:\n"
            f"{made.tail()}\n{imported.tail()}".strip(),
            f"Debian {suite} from {mirror or 'the public mirror'}",
            "check the network; GPUBOX_DEBIAN_MIRROR names another mirror",
        )
    return own_base(suite)


def _base(podman: Podman, suite: str, cache: Path, console: Console) -> str:
    """A base image: the one that is there, the public one, or one made here."""
    for name in (public_base(suite), own_base(suite)):
        if labels(podman, name) is not None:
            return name
    with console.step(f"looking for {public_base(suite)}"):
        pulled = podman.run("pull", "--quiet", public_base(suite))
    if pulled.code == 0:
        _pulled(cache, suite).touch()
        return public_base(suite)
    refused = pulled.tail(1)[-200:]
    mirror = os.environ.get("GPUBOX_DEBIAN_MIRROR") or debian_mirror(Path("/etc/apt"))
    return _make_base(podman, suite, mirror, console, refused)


def ensure(podman: Podman, suite: str, cache: Path, console: Console) -> str:
    """Id of the system image, built if it is missing or its recipe has changed.

    Raises:
        GpuboxError: neither a registry nor Debian's packages can be reached, or the build failed.
    """
    name = system_image(suite)
    wanted = recipe()
    with lock.in_turn(cache / f"image-{suite}.lock"):
        found = labels(podman, name)
        if found is None or found.get(RECIPE_LABEL) != wanted:
            base = _base(podman, suite, cache, console)
            with console.step(f"building the system image {name} on {base}"):
                podman.must(
                    "build",
                    *("--quiet", "--tag", name, "--pull=never", "--layers=false"),
                    *("--label", f"{RECIPE_LABEL}={wanted}", "--label", f"{MADE_LABEL}=true"),
                    *("--build-arg", f"BASE={base}", "--build-arg", f"SUITE={suite}"),
                    str(CONTEXT),
                    wanted=f"a system image of Debian {suite} with systemd",
                    remedy="check the network (apt in the build needs Debian's packages), repeat",
                )
        return podman.must(
            *("image", "inspect", "--format", "{{.Id}}", name),
            wanted=f"the image {name}",
            remedy="run `make demo` again",
        )


def remove(podman: Podman, suites: tuple[str, ...], cache: Path) -> tuple[list[str], list[str]]:
    """Remove the images made or pulled here; the names of the removed and of those still in use."""
    removed: list[str] = []
    kept: list[str] = []
    for suite in suites:
        for name in (system_image(suite), own_base(suite), public_base(suite)):
            found = labels(podman, name)
            pulled = name == public_base(suite) and _pulled(cache, suite).exists()
            if found is None or not (pulled or found.get(MADE_LABEL) == "true"):
                continue
            (removed if podman.run("rmi", name).code == 0 else kept).append(name)
    # an image that was built anew leaves the older one behind without a name
    filters = ("--filter", "dangling=true", "--filter", f"label={MADE_LABEL}=true")
    for identity in dict.fromkeys(podman.run("images", "--quiet", *filters).output.split()):
        (removed if podman.run("rmi", identity).code == 0 else kept).append(identity)
    return removed, kept


def _pulled(cache: Path, suite: str) -> Path:
    """Exists when the public image was pulled here: what was there before is not ours to remove."""
    return cache / f"pulled-{suite}"
