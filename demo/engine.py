# SPDX-License-Identifier: Apache-2.0
"""podman, with the configuration that this machine needs and with errors a person can act on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from gpubox.errors import GpuboxError

from . import commands, host
from .commands import Outcome

MINIMUM = (4, 3)  # Debian 12's


def environment(cache: Path, found: host.Limits) -> dict[str, str]:
    """Variables for podman on this machine; writes its configuration file if one is needed."""
    text = host.containers_conf(found)
    if not text or os.environ.get("CONTAINERS_CONF"):
        return {}
    path = cache / "podman" / "containers.conf"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_suffix(f".{os.getpid()}")
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    return {"CONTAINERS_CONF": str(path), "PODMAN_IGNORE_CGROUPSV1_WARNING": "1"}


class Podman:
    """Runs podman commands."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = dict(variables)

    @classmethod
    def here(cls, cache: Path) -> Podman:
        """The podman of this machine, checked to answer.

        Raises:
            GpuboxError: podman is missing, too old or does not work.
        """
        if shutil.which("podman") is None:
            raise GpuboxError(
                "there is no podman on PATH",
                "podman 4.3 or newer",
                "run `make setup`: it installs podman, or prints the command that does",
            )
        podman = cls(environment(cache, host.limits()))
        outcome = podman.run("version", "--format", "{{.Client.Version}}")
        version = outcome.output.strip()
        if outcome.code != 0:
            raise GpuboxError(
                f"podman does not work here:\n{outcome.tail()}",
                "`podman version` to answer",
                "correct what it says; `podman info` tells more",
            )
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < MINIMUM:
            raise GpuboxError(
                f"podman is version {version}",
                "podman 4.3 or newer",
                "upgrade podman with your system's package manager",
            )
        return podman

    def run(self, *arguments: str, stdin: str | None = None) -> Outcome:
        """Run ``podman ARGUMENTS``, whatever its exit status."""
        return commands.run(["podman", *arguments], env=self.variables, stdin=stdin)

    def must(self, *arguments: str, wanted: str, remedy: str, stdin: str | None = None) -> str:
        """Run ``podman ARGUMENTS`` and return what it prints.

        Raises:
            GpuboxError: it failed; ``wanted`` and ``remedy`` say what for and what now.
        """
        outcome = self.run(*arguments, stdin=stdin)
        if outcome.code != 0:
            raise GpuboxError(
                f"`podman {arguments[0]}` ended with {outcome.code}:\n{outcome.tail()}",
                wanted,
                remedy,
            )
        return outcome.output.strip()

    def inside(self, container: str, *argv: str) -> Outcome:
        """Run a command in a container."""
        return self.run("exec", container, *argv)
