# SPDX-License-Identifier: Apache-2.0
"""What lies around the cards: NUMA nodes, IOMMU, ACS, CUDA toolkits, the kind of container."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from .probe import Fact, Run, known, read_text, strip_ansi, tail, unknown

_NODE = re.compile(r"node([0-9]{1,4})")
_NODE_MEMORY = re.compile(r"^Node [0-9]+ MemTotal:\s+([0-9]{1,18}) kB", re.MULTILINE)
_STANZA = re.compile(r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ", re.IGNORECASE)
_TOOLKIT = re.compile(r"cuda-([0-9]{1,3}\.[0-9]{1,3})")


# --- parsers --------------------------------------------------------------------------------------


def parse_acs(text: str) -> list[str] | None:
    """Addresses of the bridges that send requests between cards up to the root (ReqRedir+).

    Args:
        text: of ``lspci -Dvvv``.

    Returns:
        None when the text tells no capabilities, as for users other than root.
    """
    found: list[str] = []
    address, readable = "", False
    for line in strip_ansi(text).splitlines():
        match = _STANZA.match(line)
        if match:
            address = match[1].lower()
        elif "Capabilities: [" in line:
            readable = True
        elif "ACSCtl:" in line and "ReqRedir+" in line and address not in ("", *found):
            found.append(address)
    return sorted(found) if readable else None


def iommu_state(types: Collection[str]) -> str | None:
    """``on`` (addresses are translated), ``passthrough``, or None for types of another kind.

    Args:
        types: of the groups, as in ``/sys/kernel/iommu_groups/*/type``.
    """
    if any(one.startswith("DMA") for one in types):
        return "on"
    return "passthrough" if "identity" in types else None


def parse_node_memory(text: str) -> int | None:
    """Bytes of a NUMA node, from its ``meminfo``."""
    match = _NODE_MEMORY.search(text)
    return int(match[1]) * 1024 if match else None


def parse_cpu_list(text: str) -> set[int] | None:
    """CPUs of a kernel list such as ``0-3,8``, None when it is none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None:
            return None
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found or None


def cpu_list(cpus: Collection[int]) -> str:
    """CPUs in the kernel's form, such as ``0-3,8``."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def parse_toolkit(text: str) -> str | None:
    """Version of a toolkit from its ``version.json``."""
    try:
        version = json.loads(text)["cuda"]["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return version if isinstance(version, str) and version else None


# --- probes ---------------------------------------------------------------------------------------


def numa_node(root: Path, address: str) -> int | None:
    """NUMA node of a PCI device; a box that does not say has -1 there."""
    text, _ = read_text(root / "sys/bus/pci/devices" / address / "numa_node")
    match = re.fullmatch(r"[0-9]{1,4}", (text or "").strip())
    return int(match[0]) if match else None


def iommu(root: Path, addresses: Collection[str]) -> dict[str, Fact]:
    """``off``, ``on`` or ``passthrough`` for the cards (for all devices where there is none)."""
    directory = root / "sys/kernel/iommu_groups"
    try:
        groups = sorted(directory.iterdir())
    except OSError as error:
        return {"iommu": unknown(f"{directory}: {error.strerror or error}", str(directory))}
    if not groups:
        return {"iommu": known("off", str(directory))}
    ours = [
        group
        for group in groups
        if any((group / "devices" / address).exists() for address in addresses)
    ]
    types = {(read_text(group / "type")[0] or "").strip() for group in ours or groups}
    state = iommu_state(types)
    if state is None:
        reason = f"types of the groups: {', '.join(sorted(types - {''})) or 'not readable'}"
        return {"iommu": unknown(reason, str(directory))}
    return {"iommu": known(state, str(directory))}


def acs(run: Run) -> dict[str, Fact]:
    """Bridges whose ACS keeps the cards from reaching each other directly."""
    source = "lspci -Dvvv"
    output = run(["lspci", "-Dvvv"])
    found = parse_acs(output.stdout)
    if found is None:
        reason = output.fault or f"no capabilities are told: {tail(output)}"
        return {"acs_redirecting": unknown(reason, source)}
    return {"acs_redirecting": known(found, source)}


def numa_nodes(root: Path, allowed: Collection[int] | None) -> dict[str, Fact]:
    """NUMA nodes with their memory and those of their CPUs that may be used."""
    directory = root / "sys/devices/system/node"
    nodes: list[dict[str, Any]] = []
    try:
        entries = [(entry, _NODE.fullmatch(entry.name)) for entry in directory.iterdir()]
    except OSError as error:
        return {"numa_nodes": unknown(f"{directory}: {error.strerror or error}", str(directory))}
    for entry, match in entries:
        if match is None:
            continue
        cpus = parse_cpu_list(read_text(entry / "cpulist")[0] or "") or set()
        usable = cpus if allowed is None else cpus & set(allowed)
        memory = parse_node_memory(read_text(entry / "meminfo")[0] or "")
        nodes.append(
            {"node": int(match[1]), "cpus": cpu_list(usable), "memory_total_bytes": memory}
        )
    if not nodes:
        return {"numa_nodes": unknown(f"{directory} has no node", str(directory))}
    return {"numa_nodes": known(sorted(nodes, key=lambda one: int(one["node"])), str(directory))}


def cuda_toolkits(root: Path) -> dict[str, Fact]:
    """Toolkits side by side; ``/usr/local/cuda`` belongs to whoever came last (field report C2)."""
    directory = root / "usr/local"
    found = []
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        return {"cuda_toolkits": unknown(f"{directory}: {error.strerror or error}", str(directory))}
    for entry in entries:
        match = _TOOLKIT.fullmatch(entry.name)
        if match:
            text, _ = read_text(entry / "version.json")
            found.append(
                {
                    "toolkit": match[1],
                    "version": parse_toolkit(text or "") or match[1],
                    "compiler": (entry / "bin/nvcc").exists(),
                }
            )
    return {"cuda_toolkits": known(found, str(directory))}


def cuda_link(root: Path) -> dict[str, Fact]:
    """Where ``/usr/local/cuda`` leads, and whether it is the alternative (field report C2).

    ``kind`` is ``none``, ``directory``, ``link`` (a plain one) or ``alternative``; ``target`` is
    the last path of the way, None where there is nothing; ``alternative`` says that the system has
    one.
    """
    name, alternative = "/usr/local/cuda", "/etc/alternatives/cuda"
    source = str(root) + name
    here, kind, steps = name, "none", 0
    try:
        while steps < 16 and (root / here.lstrip("/")).is_symlink():
            target = PurePosixPath(here).parent / (root / here.lstrip("/")).readlink()
            here = os.path.normpath(target)  # of the box, not of the machine that reads it
            kind = "alternative" if here == alternative or kind == "alternative" else "link"
            steps += 1
        end = root / here.lstrip("/")
        if kind == "none" and end.is_dir():
            kind = "directory"
        value = {
            "kind": kind,
            "target": here if end.is_dir() else None,
            "alternative": (root / alternative.lstrip("/")).is_symlink(),
        }
    except (OSError, ValueError) as error:
        return {"cuda_link": unknown(f"{source}: {error}", source)}
    if not (root / "usr/local").is_dir():
        return {"cuda_link": unknown(f"{root}/usr/local is no directory", source)}
    return {"cuda_link": known(value, source)}


def container(root: Path, run: Run) -> dict[str, Fact]:
    """The kind of container (podman, docker, lxc …), ``none`` on a machine of its own."""
    source = "systemd-detect-virt --container"
    output = run(["systemd-detect-virt", "--container"])
    word = output.stdout.strip()
    if not output.fault and re.fullmatch(r"[a-z][a-z0-9-]{0,30}", word):
        return {"container": known(word, source)}
    for name, kind in (("run/.containerenv", "podman"), (".dockerenv", "docker")):
        if (root / name).exists():
            return {"container": known(kind, str(root / name))}
    return {"container": unknown(tail(output), source)}
