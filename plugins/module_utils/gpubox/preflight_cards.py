# SPDX-License-Identifier: Apache-2.0
"""What the cards and their driver say before the box is changed: findings from hardware facts.

A fact is ``{"value", "unknown", "source"}`` as hardware_facts returns it. An unknown fact is never
taken for a good one: where it matters it is said. The rules come from the field reports (D1 to D14)
in which people lost days to each of these states.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from .preflight import Finding

Facts = Mapping[str, Mapping[str, Any]]
# PCI device ids from here on are Blackwell, which has open kernel modules only (field report D3)
FIRST_OPEN_ONLY_DEVICE = 0x2900
UNTOLD_MIB = 1024  # an idle card shows a few to some hundred MiB, by kind and driver
CUDA_13_DRIVER = (580, 65, 6)  # the lowest that CUDA 13 takes (field report C3)
# linux-modules-nvidia-580-server-open-6.14.0-37-generic: prebuilt modules of one kernel
_PREBUILT = re.compile(r"linux-modules-nvidia-[0-9]+(?:-server)?(?:-open)?-(?P<kernel>[0-9]+\.\S+)")

# the DKMS packages of the driver itself; nvidia-fs and nvidia-peermem are others
_DRIVER_MODULE = re.compile(r"nvidia(-current|-open|-srv|-server|-[0-9]+)*")


def _value(facts: Facts, name: str) -> Any:
    return facts.get(name, {}).get("value")


def check_cards(facts: Facts, own_processes: Collection[int] = ()) -> list[Finding]:
    """The state of each card. Lost, missing and mixed cards are faults of the plan.

    Args:
        facts: hardware facts.
        own_processes: process ids of our own unit, which may hold memory of the cards.
    """
    found = []
    for card in _value(facts, "gpus") or []:
        found += _card_findings(card)
    processes = _value(facts, "gpu_processes") or []
    if not own_processes:
        found += _untold_findings(facts, {process["address"] for process in processes})
    for process in processes:
        if process["pid"] not in own_processes:
            held = process["memory_used_mib"]
            found.append(
                Finding(
                    # what only draws is little, and stays beside the share of the server
                    "warning" if process.get("kind") == "G" else "error",
                    "memory",
                    f"PID {process['pid']} ({process['name'] or 'name unknown'}) holds "
                    f"{'memory' if held is None else f'{held} MiB'} of card {process['address']}",
                    "cards that only the unit uses",
                    f"end that process (ps -fp {process['pid']} says what it is)",
                )
            )
    return found


def _untold_findings(facts: Facts, told: Collection[str]) -> list[Finding]:
    """Memory that is in use though no process is told, as of another container."""
    return [
        Finding(
            "warning",
            "memory",
            f"card {card['address']}: {card['memory_used_mib']} MiB are in use, by no process that "
            "nvidia-smi tells",
            f"cards that only the unit uses (at most {UNTOLD_MIB} MiB are the driver's own)",
            "look with `fuser -v /dev/nvidia*`, also outside of this container",
        )
        for card in _value(facts, "gpus") or []
        if (card.get("memory_used_mib") or 0) > UNTOLD_MIB and card["address"] not in told
    ]


def _card_findings(card: Mapping[str, Any]) -> list[Finding]:
    address = card["address"] or f"number {card['index']}"
    found = []
    if card["mig_current"] == "enabled":
        found.append(
            Finding(
                "error",
                "cards",
                f"card {address} has MIG enabled",
                "whole cards",
                f"nvidia-smi -i {address} -mig 0",
            )
        )
    for mode in ("mig", "ecc"):
        current, pending = card[f"{mode}_current"], card[f"{mode}_pending"]
        if pending is not None and current is not None and pending != current:
            found.append(
                Finding(
                    "warning",
                    "cards",
                    f"card {address}: {mode.upper()} is {current} and {pending} after a reset",
                    "one and the same: memory and speed change at the next boot otherwise",
                    "reboot now, or set the mode back",
                )
            )
    width, most = card["pcie_width"], card["pcie_width_max"]
    # the generation falls when a card is idle, the width does not
    if width is not None and most is not None and width < most:
        found.append(
            Finding(
                "warning",
                "cards",
                f"card {address} runs {width} of {most} PCIe lanes",
                f"{most} lanes: all-reduce goes over them",
                "look at the slot, the riser and the BIOS' bifurcation",
            )
        )
    return found


def check_driver(facts: Facts, wanted: str = "") -> list[Finding]:
    """The NVIDIA driver: loaded and installed, flavour, kernels, Secure Boot, and the pinned one.

    Args:
        facts: hardware facts.
        wanted: the version that has to be loaded, because no phase installs one; empty for any.
    """
    devices = _value(facts, "nvidia_devices") or []
    if not devices:
        return []
    found = []
    loaded, installed = _value(facts, "driver_loaded"), _value(facts, "driver_installed")
    if loaded and installed and loaded != installed:
        found.append(
            Finding(
                "error",
                "driver",
                f"kernel module {loaded} is loaded, libraries {installed} are installed",
                "one version: CUDA programs that start now fail",
                "reboot; hold the driver's packages to keep unattended upgrades off them",
            )
        )
    elif loaded and facts.get("gpus", {}).get("unknown"):
        found.append(
            Finding(
                "error",
                "driver",
                f"kernel module {loaded} is loaded, and nvidia-smi fails: "
                f"{facts['gpus']['unknown']}",
                "a list of cards",
                "read dmesg for NVRM lines, and install the libraries of the loaded module",
            )
        )
    others = _value(facts, "other_drivers")
    if others and not loaded:
        found.append(
            Finding(
                "error",
                "driver",
                f"{' and '.join(others)} is loaded and holds the cards",
                "the cards free for the NVIDIA driver",
                "write `blacklist nouveau` and `options nouveau modeset=0` into /etc/modprobe.d, "
                "run update-initramfs -u and reboot",
            )
        )
    module = _value(facts, "module_installed") or {}
    flavours = {_value(facts, "driver_flavour"), module.get("flavour")}
    open_only = [
        device["address"]
        for device in devices
        if _device_number(device["device_id"]) >= FIRST_OPEN_ONLY_DEVICE
    ]
    if open_only and "proprietary" in flavours:
        found.append(
            Finding(
                "error",
                "driver",
                f"proprietary kernel modules, and cards that do not work with them: "
                f"{', '.join(open_only)}",
                "the open kernel modules",
                "install the driver package whose name ends in -open",
            )
        )
    found += _fabric_findings(facts)
    found += _kernel_findings(facts) + _secure_boot_findings(facts, module)
    return found + _pinned_findings(facts, wanted, any(one.severity == "error" for one in found))


def _fabric_findings(facts: Facts) -> list[Finding]:
    """The fabric manager goes with NVSwitches, and with nothing else (field report D10)."""
    switches, packages = _value(facts, "nvswitch_devices"), _value(facts, "driver_packages")
    if switches is None or not packages:
        return []
    names = [one["package"] for one in packages]
    there = [name for name in names if name.startswith("nvidia-fabricmanager")]
    if bool(there) == bool(switches):
        return []
    if there:
        measured = f"{', '.join(there)} is installed, and the box has no NVSwitch"
        wanted, remedy = "no fabric manager: its unit fails here", f"apt purge {' '.join(there)}"
    else:
        measured = f"{len(switches)} NVSwitches, and no package of the fabric manager"
        wanted = "the fabric manager: without it CUDA does not start on these cards"
        remedy = "install nvidia-fabricmanager in the version of the driver"
    return [Finding("warning", "driver", measured, wanted, remedy)]


def _pinned_findings(facts: Facts, wanted: str, explained: bool) -> list[Finding]:
    """Another driver than the pinned one, or none.

    Of a driver that waits for a reboot the version that comes is judged.

    Args:
        explained: another finding says already why the driver does not work.
    """
    loaded, installed = _value(facts, "driver_loaded"), _value(facts, "driver_installed")
    module = (_value(facts, "module_installed") or {}).get("version")
    version = (installed if loaded else None) or loaded or installed or module
    there = version or _value(facts, "driver_packages") or _dkms_drivers(facts)
    if not wanted or (loaded and version == wanted):
        return []
    if explained and there and version in (None, wanted):
        return []
    remedy = "install that driver with its open kernel modules and reboot; gpubox installs none"
    if version is None:
        reason = facts.get("driver_installed", {}).get("unknown") or "none is installed"
        measured = f"no NVIDIA driver is loaded ({reason})"
    elif version == wanted:
        measured = f"driver {version} is installed and not loaded"
        remedy = "run modprobe nvidia or reboot; if it is not loaded then, dmesg says why"
    else:
        measured = f"driver {version} is {'loaded' if version == loaded else 'installed'}"
        remedy += f"; or set nvidia_driver_version: {version} if you know that it works"
    return [Finding("error", "driver", measured, f"driver {wanted} is loaded", remedy)]


def _device_number(device_id: str) -> int:
    try:
        return int(device_id.rpartition(":")[2], 16)
    except ValueError:
        return 0


def _kernel_findings(facts: Facts) -> list[Finding]:
    """Kernels that have no NVIDIA module, of those that run now or at the next boot."""
    built = {
        entry["kernel"]
        for entry in _value(facts, "dkms") or []
        if _DRIVER_MODULE.fullmatch(entry["module"]) and entry["state"] == "installed"
    }
    for package in _value(facts, "driver_packages") or []:
        match = _PREBUILT.fullmatch(package["package"])
        if match:
            built.add(match["kernel"])
    if not built:
        return _unbuilt_findings(facts)
    running, boot = _value(facts, "kernel_running"), _value(facts, "kernel_boot")
    if running and _value(facts, "driver_loaded"):
        built.add(running)  # a module that is loaded is there, however it was installed
    found = []
    for kernel, severity, when in ((running, "error", "runs"), (boot, "warning", "boots next")):
        if kernel and kernel not in built and not (severity == "warning" and kernel == running):
            found.append(
                Finding(
                    severity,
                    "driver",
                    f"kernel {kernel} {when}; there are NVIDIA modules for "
                    f"{', '.join(sorted(built))} only",
                    "a module for that kernel",
                    f"install linux-headers-{kernel} and run dkms autoinstall -k {kernel}, or "
                    "install the linux-modules-nvidia package of that kernel",
                )
            )
    return found


def _dkms_drivers(facts: Facts) -> set[str]:
    """The driver as DKMS knows it, module and version, whether built or not."""
    return {
        f"{entry['module']}/{entry['version']}"
        for entry in _value(facts, "dkms") or []
        if _DRIVER_MODULE.fullmatch(entry["module"])
    }


def _unbuilt_findings(facts: Facts) -> list[Finding]:
    """A DKMS driver that is installed for no kernel, as after a failed build."""
    versions = _dkms_drivers(facts)
    if not versions or _value(facts, "driver_loaded"):
        return []  # what is loaded is there, however it was installed
    kernel = _value(facts, "kernel_running") or "$(uname -r)"
    return [
        Finding(
            "error",
            "driver",
            f"DKMS has {', '.join(sorted(versions))}, and no kernel has it installed",
            "a module for the kernel that runs",
            f"install linux-headers-{kernel}, run dkms autoinstall -k {kernel}, and read "
            "/var/lib/dkms/nvidia/*/build/make.log if that fails",
        )
    ]


def check_toolkits(facts: Facts, wanted: Collection[str], torch_cuda: str | None) -> list[Finding]:
    """Toolkits that are needed and there, and one that matches torch (field reports C1 and C3).

    Args:
        facts: hardware facts.
        wanted: versions such as ``13.0``.
        torch_cuda: of torch's wheels; None when the pins do not say.
    """
    found = []
    toolkits = _value(facts, "cuda_toolkits")
    there = [one["toolkit"] for one in toolkits or [] if one["compiler"]]
    missing = [version for version in wanted if version not in there]
    if missing:
        found.append(
            Finding(
                "error",
                "toolkit",
                f"no nvcc of CUDA {', '.join(missing)} below /usr/local; "
                + (
                    facts.get("cuda_toolkits", {}).get("unknown")
                    or f"there is {', '.join(there) or 'none'}"
                ),
                f"cuda-toolkit {' and '.join(wanted)} side by side",
                "install cuda-toolkit-"
                + " cuda-toolkit-".join(one.replace(".", "-") for one in missing)
                + " (never the package cuda, which brings a driver)",
            )
        )
    major = (torch_cuda or "").partition(".")[0]
    if major and wanted and major not in [one.partition(".")[0] for one in wanted]:
        found.append(
            Finding(
                "error",
                "toolkit",
                f"torch is built for CUDA {torch_cuda}, the toolkits are {', '.join(wanted)}",
                "a toolkit of the same major version: torch refuses to build with another",
                "add it to cuda_toolkits_versions",
            )
        )
    loaded, highest = _value(facts, "driver_loaded"), _value(facts, "driver_cuda_max")
    old = bool(major == "13" and loaded and _numbers(loaded) < CUDA_13_DRIVER)
    if highest and major:
        old = _numbers(highest)[:1] < _numbers(major)
    if old:
        serves = f" and serves CUDA up to {highest}" if highest else ""
        found.append(
            Finding(
                "error",
                "driver",
                f"driver {loaded} is loaded{serves}, torch is built for CUDA {torch_cuda}",
                f"driver {'.'.join(f'{part:02d}' for part in CUDA_13_DRIVER)} or newer"
                if major == "13"
                else f"a driver that serves CUDA {major}",
                "install a newer driver and reboot",
            )
        )
    return found


def check_cuda_link(facts: Facts, wanted: Collection[str]) -> list[Finding]:
    """``/usr/local/cuda`` belongs to whoever was installed last (field report C2).

    gpubox uses absolute paths, but what is compiled while serving asks that link too.

    Args:
        facts: hardware facts.
        wanted: the toolkits of the stack, that of the system first.
    """
    link = _value(facts, "cuda_link")
    if not wanted or not link or link["kind"] in ("none", "directory"):
        return []
    good = [f"/usr/local/cuda-{version}" for version in wanted]
    setting = f"update-alternatives --set cuda {good[0]}"
    if link["kind"] == "link" and link["alternative"]:
        measured = f"/usr/local/cuda is a plain link to {link['target'] or 'nothing'}"
        wish = "the alternative cuda, which is there: update-alternatives no longer rules the link"
        remedy = f"ln -sfn /etc/alternatives/cuda /usr/local/cuda, then {setting}"
    elif link["target"] not in good:
        measured = f"/usr/local/cuda leads to {link['target'] or 'nothing'}"
        wish = f"one of: {', '.join(good)}"
        remedy = setting if link["kind"] == "alternative" else f"ln -sfn {good[0]} /usr/local/cuda"
    else:
        return []
    return [Finding("warning", "toolkit", measured, wish, remedy)]


def check_links(facts: Facts) -> list[Finding]:
    """Bridges and an IOMMU that keep cards from reaching each other: NCCL hangs (field report V1).

    That they may reach each other by what ``nvidia-smi topo -p2p`` says is no proof.
    """
    devices, bridges = _value(facts, "nvidia_devices") or [], _value(facts, "acs_redirecting")
    if len(devices) < 2 or _value(facts, "iommu") != "on" or not bridges:
        return []
    return [
        Finding(
            "warning",
            "cards",
            f"the IOMMU translates the addresses of the cards, and {len(bridges)} bridges redirect "
            f"requests (ACS), the first is {bridges[0]}",
            "cards that reach each other directly: NCCL hangs at its first all-reduce otherwise",
            "boot with iommu=pt, or switch the IOMMU or ACS off in the BIOS; or set "
            "NCCL_P2P_DISABLE: 1 in serving_environment, which is slower",
        )
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version))


def _secure_boot_findings(facts: Facts, module: Mapping[str, Any]) -> list[Finding]:
    if not _value(facts, "secure_boot") or not module or module.get("signer"):
        return []
    return [
        Finding(
            "error",
            "driver",
            f"Secure Boot is on, and the NVIDIA module {module['version']} is not signed",
            "a module that the firmware lets the kernel load",
            "install the signed linux-modules-nvidia package of this kernel, or enrol a key at the "
            "console (mokutil --import), or switch Secure Boot off",
        )
    ]
