# SPDX-License-Identifier: Apache-2.0
"""Everything that can be known to fail before the box is changed, as one list of findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import GpuboxError

GIB = 1024**3
# Measured: the stack glm5-cpu takes 3.5 GB on disk; the CUDA stack's wheels unpack to about 12 GB.
ENVIRONMENT_BYTES = {"cpu": 4 * GIB, "cuda": 16 * GIB}
# Left free besides what is needed, so that a full disk is refused and not met.
RESERVE_BYTES = GIB


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way (``error``) or deserves a look (``warning``)."""

    severity: str
    check: str
    measured: str
    wanted: str
    remedy: str

    def sentence(self) -> str:
        """The finding on three lines, for people."""
        return (
            f"{self.severity} [{self.check}] measured: {self.measured}\n"
            f"  wanted: {self.wanted}\n  do: {self.remedy}"
        )


def check_host(
    system: str, os_release: Mapping[str, str] | None, architecture: str | None
) -> list[Finding]:
    """systemd as the init, Debian or Ubuntu, x86_64.

    Args:
        system: the command name of process 1.
        os_release: keys of /etc/os-release, None when unknown.
        architecture: as ``uname -m`` prints it, None when unknown.
    """
    found = []
    if system != "systemd":
        found.append(
            Finding(
                "error",
                "init",
                f"process 1 is {system or 'unknown'}",
                "systemd, which runs the service",
                "boot the machine or container with systemd as PID 1",
            )
        )
    names = f"{(os_release or {}).get('ID', '')} {(os_release or {}).get('ID_LIKE', '')}".split()
    if not {"debian", "ubuntu"} & set(names):
        found.append(
            Finding(
                "error",
                "system",
                f"ID is {' '.join(names) or 'unknown'}",
                "Debian or Ubuntu (packages come by apt)",
                "install Ubuntu 24.04 or Debian 12 or later",
            )
        )
    if architecture != "x86_64":
        found.append(
            Finding(
                "error",
                "architecture",
                architecture or "unknown",
                "x86_64 (the stacks pin wheels of it)",
                "use an x86_64 machine",
            )
        )
    return found


def check_device(stack: str, wanted: str, box: str) -> list[Finding]:
    """The stack is for the device that the box has; CPU peculiarities never reach a GPU box."""
    if wanted == box:
        return []
    if wanted == "cuda":
        return [
            Finding(
                "error",
                "device",
                "no NVIDIA device",
                f"an NVIDIA card for stack {stack}",
                "seat or power the cards (lspci -nn | grep 10de), or set plan_stack: glm5-cpu",
            )
        ]
    return [
        Finding(
            "error",
            "device",
            "the box has NVIDIA devices",
            f"none, because stack {stack} patches vLLM for CPUs",
            "set plan_stack: glm5-cu130",
        )
    ]


def check_model(
    config: Mapping[str, Any] | None, device: str, tensor_parallel_size: int, max_model_len: int
) -> list[Finding]:
    """The sizes of the plan against config.json (None: not there yet, so nothing is known)."""
    if config is None:
        return []
    found = []
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and (tensor_parallel_size < 1 or heads % tensor_parallel_size):
        fitting = [size for size in (1, 2, 4, 8, 16) if heads % size == 0]
        found.append(
            Finding(
                "error",
                "parallel",
                f"{heads} attention heads over {tensor_parallel_size} ranks",
                "a tensor parallel size that divides the heads",
                f"set plan_tensor_parallel_size to one of {fitting}",
            )
        )
    experts = [config.get(key) for key in ("n_routed_experts", "num_experts")]
    if None not in experts and experts[0] != experts[1]:
        found.append(
            Finding(
                "error",
                "config",
                " and ".join(f"{key} {config[key]}" for key in ("n_routed_experts", "num_experts")),
                "one number of experts",
                "remove the stale num_experts from config.json",
            )
        )
    top = config.get("index_topk")
    if device == "cpu" and isinstance(top, int) and max_model_len > top:
        found.append(
            Finding(
                "error",
                "context",
                f"max_model_len {max_model_len}",
                f"at most index_topk ({top}): a CPU has no sparse attention, and dense attention "
                "is the same only up to there",
                f"set plan_max_model_len to {top} or less",
            )
        )
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and max_model_len > longest:
        found.append(
            Finding(
                "error",
                "context",
                f"max_model_len {max_model_len}",
                f"at most max_position_embeddings ({longest})",
                f"set plan_max_model_len to {longest} or less",
            )
        )
    return found


def check_space(purpose: str, path: str, needed: int, free: int) -> list[Finding]:
    """Bytes needed below ``path`` against bytes free on its file system."""
    if free >= needed + RESERVE_BYTES or needed == 0:
        return []
    return [
        Finding(
            "error",
            "space",
            f"{free / GIB:.1f} GiB free for {path}",
            f"{(needed + RESERVE_BYTES) / GIB:.1f} GiB for the {purpose}, reserve included",
            "free space there, or move it to a larger file system",
        )
    ]


def check_source(source: str, exists: bool, merged: str, merged_exists: bool) -> list[Finding]:
    """There is something to serve."""
    if exists or merged_exists:
        return []
    return [
        Finding(
            "error",
            "model",
            f"gguf_model_source {source or 'is not set'}{' does not exist' if source else ''}, "
            f"and there is no {merged}",
            "a shard of the set on the box, or the merged file",
            "put the shards there and set gguf_model_source to any one of them",
        )
    ]


def check_shards(faults: Iterable[GpuboxError]) -> list[Finding]:
    """What reading the headers of the set found; the merge would refuse it hours later."""
    return [
        Finding("error", "model", fault.measured, fault.wanted, fault.remedy) for fault in faults
    ]


def check_companions(missing: Iterable[str], folders: Iterable[str]) -> list[Finding]:
    """config.json and the tokenizer lie beside the shards, or are in place already."""
    names = sorted(missing)
    if not names:
        return []
    return [
        Finding(
            "error",
            "model",
            f"no {', '.join(names)} in {' or '.join(folders)}",
            "the files that gguf_model_companions names",
            "put them beside the shards, or take those that the model has not out of "
            "gguf_model_companions",
        )
    ]


def check_user(name: str, passwd: str) -> list[Finding]:
    """The service user is made by us or looks as if: changing a person's account locks them out.

    Args:
        name: the service user.
        passwd: text of /etc/passwd.
    """
    for line in passwd.splitlines():
        fields = line.split(":")
        if fields[0] != name or len(fields) < 7:
            continue
        shell = fields[6].strip()
        if fields[2] == "0" or shell.rpartition("/")[2] not in ("nologin", "false"):
            return [
                Finding(
                    "error",
                    "user",
                    f"user {name} exists with uid {fields[2]} and shell {shell or '/bin/sh'}",
                    "a user of the service alone, who cannot log in",
                    f"set serving_user to another name, or `usermod --shell /usr/sbin/nologin "
                    f"{name}` if nobody logs in by it",
                )
            ]
    return []


def check_unit(name: str, load_state: str, text: str | None, ours: bool) -> list[Finding]:
    """The unit's name is free, or is that of our own unit, and systemd may start it.

    Args:
        name: the unit with its suffix.
        load_state: LoadState as systemd says, empty when it was not asked.
        text: text of the unit's file, None when there is none to read.
        ours: the text is in the form of gpubox's unit.
    """
    if load_state == "masked":
        return [
            Finding(
                "error",
                "unit",
                f"{name} is masked",
                "a unit that systemd may start",
                f"systemctl unmask {name}",
            )
        ]
    if text is not None and not ours:
        return [
            Finding(
                "error",
                "unit",
                f"{name} exists and gpubox did not write it",
                "a name that is free or gpubox's own",
                f"set serving_unit to another name, or remove the file (systemctl cat {name})",
            )
        ]
    return []


def check_directories(files: Iterable[str]) -> list[Finding]:
    """Nothing but a directory lies where a directory is needed."""
    return [
        Finding(
            "error",
            "directory",
            f"{path} is there and no directory",
            "a directory, or nothing yet",
            f"look at it (ls -l {path}) and move it away",
        )
        for path in files
    ]


def check_port(port: int, holders: Iterable[tuple[int, str]]) -> list[Finding]:
    """Nobody but our own unit listens on the port.

    Args:
        holders: process id and command of each foreign listener.
    """
    return [
        Finding(
            "error",
            "port",
            f"port {port} is held by PID {pid} ({command})",
            f"port {port} free for the unit",
            f"stop that process (ps -fp {pid}), or set serving_port",
        )
        for pid, command in sorted(holders)
    ]


def verdict(findings: Iterable[Finding]) -> dict[str, Any]:
    """Findings as data and as text; ``passed`` when none is an error."""
    ordered = sorted(findings, key=lambda finding: (finding.severity, finding.check))
    errors = [finding for finding in ordered if finding.severity == "error"]
    return {
        "passed": not errors,
        "findings": [asdict(finding) for finding in ordered],
        "text": "\n".join(finding.sentence() for finding in ordered) or "nothing stands in the way",
    }
