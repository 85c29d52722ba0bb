# SPDX-License-Identifier: Apache-2.0
"""What this machine lets containers do, and who holds a port: probes and pure decisions."""

from __future__ import annotations

import errno
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

from gpubox.errors import GpuboxError

_CAP_SYS_RESOURCE = 24  # bit number, capabilities(7)
_PODMAN_NPROC = 32768  # podman never asks for more processes than this for a container
_NOFILE_CEILING = 1048576  # what "unlimited" open files is taken as (fs.nr_open's default)


@dataclass(frozen=True)
class Limits:
    """Facts of the host that decide how podman must be configured."""

    root: bool
    may_raise_limits: bool  # CAP_SYS_RESOURCE
    unified_cgroups: bool  # cgroup version 2 only
    systemd: bool  # the host itself is managed by systemd
    nofile: int  # hard limit of open files
    nproc: int  # hard limit of processes


def has_capability(status: str, number: int) -> bool:
    """Whether the effective set in the text of /proc/self/status has a capability's bit."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False


def _hard(kind: int, ceiling: int) -> int:
    limit = resource.getrlimit(kind)[1]
    return ceiling if limit == resource.RLIM_INFINITY else min(limit, ceiling)


def limits(root: Path = Path("/")) -> Limits:
    """Probe this machine."""
    status = root / "proc/self/status"
    text = status.read_text(encoding="utf-8") if status.is_file() else ""
    return Limits(
        root=os.geteuid() == 0,
        may_raise_limits=has_capability(text, _CAP_SYS_RESOURCE),
        unified_cgroups=(root / "sys/fs/cgroup/cgroup.controllers").exists(),
        systemd=(root / "run/systemd/system").is_dir(),
        nofile=_hard(resource.RLIMIT_NOFILE, _NOFILE_CEILING),
        nproc=_hard(resource.RLIMIT_NPROC, _PODMAN_NPROC),
    )


def containers_conf(found: Limits) -> str:
    """Text of a containers.conf for machines where podman's own defaults cannot work, else ''.

    An ordinary laptop or server (systemd, cgroup version 2) needs nothing. A build or CI machine
    may lack CAP_SYS_RESOURCE (podman asks for 1048576 open files and is refused), have the older
    cgroup layout (crun refuses it) or no systemd.
    """
    containers = []
    engine = []
    if found.root and not found.may_raise_limits:
        containers.append(
            f'default_ulimits = ["nofile={found.nofile}:{found.nofile}",'
            f' "nproc={found.nproc}:{found.nproc}"]'
        )
    if not found.unified_cgroups:
        containers.append("pids_limit = 0")
        engine.append('runtime = "runc"')
    if not found.systemd:
        engine += ['cgroup_manager = "cgroupfs"', 'events_logger = "file"']
    sections = {"containers": containers, "engine": engine}
    return "".join(
        f"[{name}]\n" + "".join(f"{line}\n" for line in lines)
        for name, lines in sections.items()
        if lines
    )


def listening_inodes(table: str, port: int) -> set[str]:
    """Socket inodes that listen on a TCP port, from the text of /proc/net/tcp or tcp6."""
    found = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(fields[9])
    return found


def holder(port: int, proc: Path = Path("/proc")) -> str:
    """Who listens on a TCP port, for a person: ``nginx (PID 812)`` or ``another program``."""
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        table = proc / "net" / name
        if table.is_file():
            inodes |= listening_inodes(table.read_text(encoding="utf-8"), port)
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            if any(str(link.readlink()) in wanted for link in (process / "fd").iterdir()):
                command = (process / "comm").read_text(encoding="utf-8").strip()
                return f"{command} (PID {process.name})"
        except OSError:
            continue  # ended meanwhile, or another user's
    return "another program"


def require_free_port(port: int) -> None:
    """Make sure that a port of the loopback can be bound.

    Raises:
        GpuboxError: it is in use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise GpuboxError(
                f"port {port} of 127.0.0.1 is held by {holder(port)}",
                "a free port to publish the demo's endpoint on",
                "stop that program, or choose another port: GPUBOX_DEMO_PORT=18001 make demo",
            ) from error
