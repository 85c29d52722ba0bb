# SPDX-License-Identifier: Apache-2.0
"""Runs the site playbook on the box, the way an operator runs it on a real one."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from gpubox.errors import GpuboxError

from . import ROOT, commands, settings
from .console import Console

LOG = ROOT / ".cache" / "logs" / "demo-site.log"
_RECAP = re.compile(
    r"^(?P<host>\S+)\s*: ok=(?P<ok>\d+)\s+changed=(?P<changed>\d+)"
    r"\s+unreachable=(?P<unreachable>\d+)\s+failed=(?P<failed>\d+)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Recap:
    """The line that Ansible closes a host's run with."""

    ok: int
    changed: int
    unreachable: int
    failed: int


def recap(output: str, host: str) -> Recap | None:
    """The recap of a host in what ansible-playbook printed, or None if it got not so far."""
    found = None
    for line in output.splitlines():
        match = _RECAP.match(_COLOUR.sub("", line))
        if match and match["host"] == host:
            names = ("ok", "changed", "unreachable", "failed")
            found = Recap(*(int(match[name]) for name in names))
    return found


def variables(chosen: settings.Settings) -> dict[str, str]:
    """Environment of ansible-playbook: inventory/demo reads the box's package sources from it."""
    found = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "GPUBOX_BOX_CA_BUNDLE": settings.CA_BUNDLE_IN_BOX if chosen.ca_bundle else "",
        "GPUBOX_BOX_WHEELHOUSE": chosen.find_links,
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }
    if sys.stdout.isatty():
        found["ANSIBLE_FORCE_COLOR"] = "true"
    return found


def play(chosen: settings.Settings, host: str, console: Console, log: Path = LOG) -> Recap:
    """Run ``ansible-playbook site.yml -i inventory/demo``; its output is shown as it comes.

    Raises:
        GpuboxError: the playbook failed.
    """
    argv = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        "site.yml",
        "-i",
        "inventory/demo",
    ]
    console.say("==> ansible-playbook site.yml -i inventory/demo")
    console.current = "ansible-playbook site.yml"
    code = commands.stream(argv, env=variables(chosen), cwd=ROOT, log=log, show=console.say)
    found = recap(log.read_text(encoding="utf-8"), host)
    if code != 0 or found is None or found.failed or found.unreachable:
        raise GpuboxError(
            f"ansible-playbook ended with {code}; its error is above and in {log}",
            f"{host} as site.yml describes it",
            "correct what the error names, then run `make demo` again: it continues from there",
        )
    return found
