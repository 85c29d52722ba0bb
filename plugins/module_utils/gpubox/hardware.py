# SPDX-License-Identifier: Apache-2.0
"""What the box is, from the texts of its tools and files.

Parsers are pure and take any text: colour codes, ``rev ff``, ``[N/A]``, missing rows and complaints
between the rows are met on real boxes. A fact is a value or *unknown* with the reason; no answer is
never taken for "none" (field report A3).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from . import apt, machine, storage
from .machine import parse_cpu_list
from .probe import Fact, Output, Run, known, read_text, run_command, strip_ansi, tail, unknown

NVIDIA = "10de"
# PCI classes of graphics cards: VGA compatible controller and 3D controller (server boards)
GPU_CLASSES = ("0300", "0302")
NVSWITCH_CLASS = "0680"
SMI_FIELDS = (
    "index",
    "pci.bus_id",
    "name",
    "uuid",
    "memory.total",
    "compute_cap",
    "driver_version",
)
# nvidia-smi refuses the whole query when an older driver does not know one of them
SMI_MORE_FIELDS = (
    "memory.used",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.mode.current",
    "ecc.mode.pending",
    "mig.mode.current",
    "mig.mode.pending",
)
# modules of the kernel that hold a card so that the driver does not get it
OTHER_DRIVERS = ("nouveau", "nvidiafb")
KERNEL_LINES = 64  # of the driver in the kernel's log, from the end
# Classes of `nvidia-smi topo -m` (its own legend), in our words
LINKS = {
    "PIX": "pcie_switch",
    "PXB": "pcie_switch",
    "PHB": "pcie_socket",
    "NODE": "pcie_socket",
    "SYS": "pcie_cross_socket",
}
MIB = 1024**2
# dpkg patterns of a driver in Ubuntu's archive, in Debian's and in NVIDIA's repository
DRIVER_PATTERNS = (
    "cuda-drivers*",
    "libnvidia-*",
    "linux-modules-nvidia-*",
    "nvidia-compute-utils*",
    "nvidia-dkms*",
    "nvidia-driver*",
    "nvidia-fabricmanager*",
    "nvidia-firmware*",
    "nvidia-headless*",
    "nvidia-kernel-*",
    "nvidia-open*",
    "nvidia-utils*",
    "xserver-xorg-video-nvidia*",
)
# the packages that hold the library whose version has to be that of the module
_LIBRARY_PACKAGE = re.compile(r"libnvidia-compute(-\d+(-server)?)?|libnvidia-ml1")
_ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<slot>[0-9a-f]{2})\.(?P<function>[0-7])",
    re.IGNORECASE,
)
_LSPCI = re.compile(
    r"(?P<address>[0-9a-f:.]+) (?P<kind>.*?) ?\[(?P<class>[0-9a-f]{4})\]: "
    r"(?P<name>.*) \[(?P<vendor>[0-9a-f]{4}):(?P<device>[0-9a-f]{4})\]"
    r"(?: \(rev (?P<revision>[0-9a-f]{2})\))?",
    re.IGNORECASE,
)
_DKMS = re.compile(
    r"(?P<module>[\w.+-]+)(?:/|, )(?P<version>[\w.+~:-]+)(?:, (?P<kernel>[\w.+~-]+)(?:, [\w-]+)?)?"
    r": (?P<state>\w+).*"
)
_DRIVER = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")


# --- parsers --------------------------------------------------------------------------------------


def normalize_address(text: str) -> str | None:
    """A PCI address as lspci -D prints it (``0000:16:00.0``), None when it is none.

    nvidia-smi prints domains with eight digits, lspci without -D leaves domain 0 out.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{match['bus']}:{match['slot']}.{match['function']}".lower()


@dataclass(frozen=True)
class PciDevice:
    """A PCI function. ``revision`` ff is a device that does not answer any more."""

    address: str
    device_class: str
    vendor_id: str
    device_id: str
    name: str | None
    revision: str | None

    def to_dict(self) -> dict[str, Any]:
        """As a fact: ``class`` and ``device_id`` (vendor:device) as lspci has them."""
        return {
            "address": self.address,
            "class": self.device_class,
            "device_id": f"{self.vendor_id}:{self.device_id}",
            "name": self.name,
            "revision": self.revision,
        }


def parse_lspci(text: str) -> list[PciDevice]:
    """Devices of ``lspci -Dnn`` in order of address; other lines are passed over."""
    found = {}
    for line in strip_ansi(text).splitlines():
        match = _LSPCI.match(line.strip())
        address = normalize_address(match["address"]) if match else None
        if match and address:
            found[address] = PciDevice(
                address,
                match["class"].lower(),
                match["vendor"].lower(),
                match["device"].lower(),
                match["name"].strip() or None,
                match["revision"].lower() if match["revision"] else None,
            )
    return [found[address] for address in sorted(found, key=_address_key)]


def _address_key(address: str) -> tuple[int, str]:
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest


def read_pci_files(directory: Path) -> list[PciDevice]:
    """Devices of ``/sys/bus/pci/devices`` in order of address.

    Raises:
        OSError: there is no such directory.
    """
    found = {}
    for entry in sorted(directory.iterdir()):
        address = normalize_address(entry.name)
        if address is None:
            continue
        values = {}
        for name in ("vendor", "device", "class", "revision"):
            try:
                text = (entry / name).read_text(encoding="ascii", errors="replace")
                values[name] = int(text.strip(), 16)
            except (OSError, ValueError):
                continue
        if {"vendor", "device", "class"} <= values.keys():
            revision = values.get("revision")
            found[address] = PciDevice(
                address,
                f"{(values['class'] >> 8) & 0xFFFF:04x}",
                f"{values['vendor'] & 0xFFFF:04x}",
                f"{values['device'] & 0xFFFF:04x}",
                None,
                None if revision is None else f"{revision & 0xFF:02x}",
            )
    return [found[address] for address in sorted(found, key=_address_key)]


def nvidia_gpus(devices: Iterable[PciDevice]) -> list[PciDevice]:
    """NVIDIA graphics cards: no audio function, no bridge, no card of another vendor."""
    return [
        device
        for device in devices
        if device.vendor_id == NVIDIA
        and device.device_class in GPU_CLASSES
        and device.address.endswith(".0")
    ]


def nvswitches(devices: Iterable[PciDevice]) -> list[PciDevice]:
    """NVSwitch bridges, the only reason for a fabric manager (field report D10)."""
    return [
        device
        for device in devices
        if device.vendor_id == NVIDIA and device.device_class == NVSWITCH_CLASS
    ]


@dataclass(frozen=True)
class Gpu:
    """A row of nvidia-smi; None where it prints ``[N/A]`` or the like."""

    index: int | None
    address: str | None
    name: str | None
    uuid: str | None
    memory_total_mib: int | None
    compute_capability: str | None
    driver_version: str | None
    memory_used_mib: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    ecc_current: str | None = None
    ecc_pending: str | None = None
    mig_current: str | None = None
    mig_pending: str | None = None


def _cell(text: str) -> str | None:
    """A value of nvidia-smi, None for ``[N/A]``, ``N/A``, ``[Unknown Error]`` and their kind."""
    text = text.strip()
    if not text or text.upper() in ("N/A", "NOT AVAILABLE") or re.fullmatch(r"\[.*\]", text):
        return None
    return text


def _whole(text: str | None, unit: str = "") -> int | None:
    """A whole number with its unit, None when it is none."""
    match = re.fullmatch(rf"([0-9]{{1,18}})(?: ?{unit})?", text or "")
    return int(match[1]) if match else None


def _mode(text: str | None) -> str | None:
    """``enabled`` or ``disabled``."""
    word = (text or "").lower()
    return word if word in ("enabled", "disabled") else None


def parse_smi_xml(text: str) -> tuple[str | None, list[dict[str, Any]]] | None:
    """``nvidia-smi -q -x``: the highest CUDA version that the driver serves, and the processes.

    Returns:
        The version, and by address and process ``address``, ``pid``, ``kind`` (C for compute, G
        for graphics, C+G), ``name`` and ``memory_used_mib`` of whatever holds memory of a card
        (None when not told); None when the text holds no such document.
    """
    begin, end = text.find("<nvidia_smi_log>"), text.rfind("</nvidia_smi_log>")
    if not 0 <= begin < end:
        return None
    try:  # without the DOCTYPE before it, so that no entity is defined
        log = ElementTree.fromstring(text[begin:end] + "</nvidia_smi_log>")  # noqa: S314
    except (ElementTree.ParseError, ValueError):
        return None
    version = _cell(log.findtext("cuda_version") or "")
    found = []
    # only where they belong: to look below every nested card takes quadratic time
    for card in log.findall("gpu"):
        address = normalize_address(card.get("id") or "")
        for process in card.findall("processes/process_info"):
            pid = _whole(process.findtext("pid"))
            if address and pid is not None:
                memory = process.findtext("used_memory") or ""
                found.append(
                    {
                        "address": address,
                        "pid": pid,
                        "kind": _cell(process.findtext("type") or ""),
                        "name": _cell(process.findtext("process_name") or ""),
                        "memory_used_mib": _whole(memory.strip(), "MiB"),
                    }
                )
    return version, sorted(found, key=lambda one: (_address_key(one["address"]), one["pid"]))


def parse_kernel_log(text: str) -> list[str]:
    """What the NVIDIA driver says in ``dmesg``, the last lines, without their time."""
    found = [line.partition("NVRM:")[2].strip() for line in text.splitlines() if "NVRM:" in line]
    return found[-KERNEL_LINES:]


def parse_modules(text: str) -> list[str]:
    """Other drivers that take NVIDIA cards, of the modules in ``/proc/modules``."""
    loaded = {line.split(" ", 1)[0] for line in text.splitlines()}
    return sorted(loaded & set(OTHER_DRIVERS))


def parse_topology(text: str, addresses: Mapping[int, str]) -> dict[str, dict[str, str]] | None:
    """Links of ``nvidia-smi topo -m``: address to address to class.

    Args:
        text: what it prints: rows and columns of GPUs and network cards, then affinities.
        addresses: by nvidia-smi's index.

    Returns:
        Classes ``nvlink``, ``pcie_switch``, ``pcie_socket`` and ``pcie_cross_socket``; None when
        the text holds no matrix. Cards without an address, and cells unlike those, are left out.
    """
    columns: list[str] = []
    found: dict[str, dict[str, str]] | None = None
    for line in strip_ansi(text).splitlines():
        words = line.split()
        if not words:
            continue
        if not columns and words[0] == "GPU0" and "X" not in words:
            columns = words[: words.index("CPU")] if "CPU" in words else words
            continue
        here = _card_address(words[0], addresses)
        if not columns or not words[0].startswith("GPU"):
            continue
        found = {} if found is None else found
        if here is None:
            continue
        found[here] = {}
        for column, cell in zip(columns, words[1:], strict=False):
            there = _card_address(column, addresses)
            link = "nvlink" if re.fullmatch(r"NV[0-9]+", cell) else LINKS.get(cell)
            if there is not None and there != here and link is not None:
                found[here][there] = link
    return found


def _card_address(word: str, addresses: Mapping[int, str]) -> str | None:
    match = re.fullmatch(r"GPU([0-9]{1,4})", word)
    return addresses.get(int(match[1])) if match else None


def parse_dkms(text: str) -> list[dict[str, str]]:
    """``dkms status``: module, version, kernel and state, in the order of the text.

    Both forms are met: ``nvidia/590.48.01, 6.8.0-90-generic, x86_64: installed`` and, before dkms
    3, ``nvidia, 535.129.03, …``. A module that is only added has the kernel ''.
    """
    found = []
    for line in strip_ansi(text).splitlines():
        match = _DKMS.fullmatch(line.strip())
        if match:
            names = ("module", "version", "kernel", "state")
            found.append({name: match[name] or "" for name in names})
    return found


def parse_modinfo(text: str) -> dict[str, str] | None:
    """``modinfo nvidia``: version, flavour, signer ('' when unsigned); None without a version."""
    values: dict[str, str] = {}
    for line in strip_ansi(text).splitlines():
        name, separator, value = line.partition(":")
        if separator:
            values.setdefault(name.strip(), value.strip())
    if not values.get("version"):
        return None
    is_open = "GPL" in values.get("license", "")
    return {
        "version": values["version"],
        "flavour": "open" if is_open else "proprietary",
        "signer": values.get("signer", ""),
    }


def parse_secure_boot(text: str) -> bool | None:
    """``mokutil --sb-state``; a system without EFI has none. None when it says neither."""
    lowered = strip_ansi(text).lower()
    if "secureboot enabled" in lowered:
        return True
    if any(sign in lowered for sign in ("secureboot disabled", "not supported", "doesn't support")):
        return False
    return None


def newest_kernel(names: Iterable[str]) -> str | None:
    """The version that GRUB starts by default: the newest of the ``vmlinuz-<version>`` names."""
    versions = [
        name.removeprefix("vmlinuz-")
        for name in names
        if name.startswith("vmlinuz-") and name != "vmlinuz-"
    ]

    def key(version: str) -> list[tuple[int, int, str]]:
        parts = re.findall(r"[0-9]+|[a-zA-Z]+", version)
        return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]

    return max(versions, key=key, default=None)


def parse_smi(text: str) -> tuple[list[Gpu] | None, list[str]]:
    """Cards of ``nvidia-smi --query-gpu=... --format=csv`` and every line that is no row.

    Returns:
        The cards in order of address, [] when nvidia-smi says that there are none, None when it
        says neither; and its complaints.
    """
    cards: list[Gpu] | None = None
    messages = []
    columns: list[str] = []
    for line in strip_ansi(text).splitlines():
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line], skipinitialspace=True))
        except (csv.Error, StopIteration):
            cells = []
        names = [cell.partition("[")[0].strip() for cell in cells]
        if "index" in names and "pci.bus_id" in names:
            columns = names  # a header alone does not say that there are no cards
        elif columns and len(cells) == len(columns):
            row = dict(zip(columns, map(_cell, cells), strict=True))
            cards = cards or []
            cards.append(
                Gpu(
                    _whole(row["index"]),
                    normalize_address(row["pci.bus_id"] or ""),
                    row.get("name"),
                    row.get("uuid"),
                    _whole(row.get("memory.total"), "MiB"),
                    row.get("compute_cap"),
                    row.get("driver_version"),
                    _whole(row.get("memory.used"), "MiB"),
                    _whole(row.get("pcie.link.gen.current")),
                    _whole(row.get("pcie.link.gen.max")),
                    _whole(row.get("pcie.link.width.current")),
                    _whole(row.get("pcie.link.width.max")),
                    _mode(row.get("ecc.mode.current")),
                    _mode(row.get("ecc.mode.pending")),
                    _mode(row.get("mig.mode.current")),
                    _mode(row.get("mig.mode.pending")),
                )
            )
        else:
            messages.append(line.strip())
            if line.strip() == "No devices were found":
                cards = cards or []
    if cards is not None:
        cards.sort(key=lambda card: _address_key(card.address) if card.address else (1 << 32, ""))
    return cards, messages


@dataclass(frozen=True)
class KernelDriver:
    """The loaded module: version and flavour (``open`` or ``proprietary``)."""

    version: str
    flavour: str


def parse_driver(text: str) -> KernelDriver | None:
    """The first line of ``/proc/driver/nvidia/version``, None when it is not like that."""
    for line in strip_ansi(text).splitlines():
        if line.startswith("NVRM version:"):
            match = _DRIVER.search(line)
            if match:
                return KernelDriver(match[1], "open" if "Open Kernel" in line else "proprietary")
    return None


def parse_packages(text: str) -> list[dict[str, str]]:
    """Installed packages of ``dpkg-query -W`` (name, version, status; tab between them)."""
    found = []
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[2].strip() == "installed" and fields[0] and fields[1]:
            found.append({"package": fields[0].strip(), "version": fields[1].strip()})
    return sorted(found, key=lambda package: package["package"])


def library_versions(packages: Iterable[dict[str, str]]) -> list[str]:
    """Upstream versions of the driver's user-space libraries, without epoch and revision."""
    found = set()
    for package in packages:
        if _LIBRARY_PACKAGE.fullmatch(package["package"].partition(":")[0]):
            match = _DRIVER.match(package["version"].rpartition(":")[2].partition("-")[0])
            if match:
                found.add(match[1])
    return sorted(found)


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+):\s+([0-9]{1,18}) kB", line.strip())
        if match:
            found[match[1]] = int(match[2]) * 1024
    return found


def parse_os_release(text: str) -> dict[str, str]:
    """``/etc/os-release`` (os-release(5): shell-like assignments, one a line)."""
    found = {}
    for line in text.splitlines():
        name, separator, value = line.strip().partition("=")
        if not separator or not re.fullmatch(r"[A-Z0-9_]+", name):
            continue
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = re.sub(r"\\(.)", r"\1", value)
    return found


def parse_status_cpus(text: str) -> set[int] | None:
    """CPUs that a process may use, from ``/proc/<pid>/status``."""
    for line in text.splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_cpu_list(line.partition(":")[2])
    return None


def parse_limit(text: str) -> int | None:
    """A limit of a control group in bytes, None for ``max`` or no number."""
    match = re.fullmatch(r"[0-9]{1,20}", text.strip())
    return int(match[0]) if match else None


def parse_cpu_max(text: str) -> float | None:
    """CPUs of cgroup v2's ``cpu.max`` (quota and period in µs), None without limit."""
    fields = text.split()
    numbers = [_whole(field) for field in fields]
    if len(numbers) == 2 and numbers[0] and numbers[1]:
        return numbers[0] / numbers[1]
    return None


def parse_statistics(text: str) -> dict[str, int]:
    """``memory.stat`` of a control group."""
    found = {}
    for line in text.splitlines():
        name, _, number = line.strip().partition(" ")
        if re.fullmatch(r"[0-9]{1,20}", number):
            found[name] = int(number)
    return found


# --- probes ---------------------------------------------------------------------------------------


class Box:
    """The facts of a box: commands through ``run``, files below ``root``.

    Args:
        root: where ``/proc`` and the like lie.
        run: runs a command.
        paths: paths whose file systems matter.
        samples: files to measure the disk's rate with; the first that is large enough is read.
        packages: system packages that will be installed.
    """

    def __init__(
        self,
        root: Path,
        run: Run = run_command,
        paths: Sequence[str] = (),
        samples: Sequence[str] = (),
        packages: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.run = run
        self.paths = paths
        self.samples = samples
        self.wanted = packages

    def pci(self) -> dict[str, Fact]:
        """Graphics cards and switches on the PCI bus."""
        source = "lspci -Dnn"
        output = self.run(["lspci", "-Dnn"])
        devices = parse_lspci(output.stdout)
        reason = tail(output)
        if not devices:
            directory = self.root / "sys/bus/pci/devices"
            source = str(directory)
            try:
                devices = read_pci_files(directory)
            except OSError as error:
                reason = f"lspci: {reason}; {directory}: {error.strerror or error}"
                names = ("nvidia_devices", "nvswitch_devices")
                facts = dict.fromkeys(names, unknown(reason, source))
                return facts | machine.iommu(self.root, []) | machine.acs(self.run)
        cards = [
            card.to_dict() | {"numa_node": machine.numa_node(self.root, card.address)}
            for card in nvidia_gpus(devices)
        ]
        return {
            "nvidia_devices": known(cards, source),
            "nvswitch_devices": known([d.to_dict() for d in nvswitches(devices)], source),
            **machine.iommu(self.root, [card["address"] for card in cards]),
            **machine.acs(self.run),
        }

    def smi(self) -> dict[str, Fact]:
        """Cards that the driver's tool sees, and what it complains of."""
        source = "nvidia-smi --query-gpu"
        output, cards, messages = Output(), None, [""]
        for fields in ((*SMI_FIELDS, *SMI_MORE_FIELDS), SMI_FIELDS):
            output = self.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv"])
            if output.fault:
                names = ("gpus", "nvidia_smi_messages", "gpu_processes", "gpu_links")
                return dict.fromkeys((*names, "driver_cuda_max"), unknown(output.fault, source))
            # the exit status is no evidence: it may be 0 with a card lost (field report D11)
            cards, messages = parse_smi(output.stdout)
            if "not a valid field to query" not in output.stdout + output.stderr:
                break
        messages += [line for line in strip_ansi(output.stderr).splitlines() if line.strip()]
        gpus = unknown(tail(output), source)
        if cards is not None:
            gpus = known([asdict(card) for card in cards], source)
        facts = {"gpus": gpus, "nvidia_smi_messages": known(messages, source)}
        if not cards:
            missing = dict.fromkeys(
                ("gpu_processes", "gpu_links", "driver_cuda_max"),
                unknown("nvidia-smi shows no card", source),
            )
            return facts | missing
        return facts | self._log() | self._links(cards)

    def _log(self) -> dict[str, Fact]:
        """Processes that hold memory of a card, those that draw too, and the driver's CUDA."""
        source = "nvidia-smi -q -x"
        output = self.run(["nvidia-smi", "-q", "-x"])
        parsed = parse_smi_xml(output.stdout)
        if parsed is None:
            names = ("gpu_processes", "driver_cuda_max")
            return dict.fromkeys(names, unknown(tail(output), source))
        version, processes = parsed
        highest = unknown("it tells no CUDA version", source)
        return {
            "gpu_processes": known(processes, source),
            "driver_cuda_max": highest if version is None else known(version, source),
        }

    def _links(self, cards: Iterable[Gpu]) -> dict[str, Fact]:
        """How the cards reach each other."""
        source = "nvidia-smi topo -m"
        output = self.run(["nvidia-smi", "topo", "-m"])
        links = parse_topology(
            output.stdout,
            {
                card.index: card.address
                for card in cards
                if card.index is not None and card.address is not None
            },
        )
        return {
            "gpu_links": unknown(tail(output), source) if links is None else known(links, source)
        }

    def driver(self) -> dict[str, Fact]:
        """The module that is loaded and the cards that it has."""
        path = self.root / "proc/driver/nvidia/version"
        text, reason = read_text(path)
        loaded = parse_driver(text) if text is not None else None
        if text is not None and loaded is None:
            reason = f"{path} has no NVRM version"
        elif text is None:
            reason += " (the nvidia module is not loaded)"
        directory = self.root / "proc/driver/nvidia/gpus"
        try:
            addresses = [normalize_address(entry.name) for entry in directory.iterdir()]
            cards = known(sorted(filter(None, addresses), key=_address_key), str(directory))
        except OSError as error:
            cards = unknown(f"{directory}: {error.strerror or error}", str(directory))
        facts = {"driver_gpus": cards, **self._kernel_log()}
        for name in ("driver_loaded", "driver_flavour"):
            field = "version" if name == "driver_loaded" else "flavour"
            facts[name] = (
                known(getattr(loaded, field), str(path)) if loaded else unknown(reason, str(path))
            )
        return facts

    def _kernel_log(self) -> dict[str, Fact]:
        """What the driver says in the kernel's log, and other drivers that are loaded."""
        source = "dmesg"
        output = self.run(["dmesg"])
        said = unknown(tail(output), source)
        if not output.fault and not output.code:
            said = known(parse_kernel_log(strip_ansi(output.stdout)), source)
        path = self.root / "proc/modules"
        text, reason = read_text(path)
        others = (
            unknown(reason, str(path)) if text is None else known(parse_modules(text), str(path))
        )
        return {"kernel_messages": said, "other_drivers": others}

    def apt(self) -> dict[str, Fact]:
        """What apt keeps at its version, and what it would do for the packages that are wanted."""
        return {**apt.keeping(self.root, self.run), **apt.installing(self.run, self.wanted)}

    def packages(self) -> dict[str, Fact]:
        """The driver's packages and the version of its libraries."""
        source = "dpkg-query -W"
        names = ("driver_installed", "driver_packages")
        output = self.run(
            [
                "dpkg-query",
                "-W",
                "-f",
                "${Package}\\t${Version}\\t${db:Status-Status}\\n",
                *DRIVER_PATTERNS,
            ]
        )
        if output.fault:
            return dict.fromkeys(names, unknown(output.fault, source))
        packages = parse_packages(output.stdout)
        # dpkg-query ends with 1 when a pattern has no package, with 2 when it could not read
        if output.code > 1:
            return dict.fromkeys(names, unknown(tail(output), source))
        versions = library_versions(packages)
        installed = unknown("no driver library is installed as a package", source)
        if len(versions) == 1:
            installed = known(versions[0], source)
        elif versions:
            installed = unknown(f"libraries of several versions: {', '.join(versions)}", source)
        return {"driver_installed": installed, "driver_packages": known(packages, source)}

    def kernel(self) -> dict[str, Fact]:
        """Kernel release and machine."""
        facts = {}
        for name, option in (("kernel_running", "-r"), ("architecture", "-m")):
            source = f"uname {option}"
            output = self.run(["uname", option])
            text = output.stdout.strip()
            usable = output.code == 0 and re.fullmatch(r"[\w.+~-]+", text)
            facts[name] = known(text, source) if usable else unknown(tail(output), source)
        return facts

    def boot(self) -> dict[str, Fact]:
        """What the next boot brings: kernel, modules built for it, Secure Boot."""
        directory = self.root / "boot"
        try:
            newest = newest_kernel(entry.name for entry in directory.iterdir())
            reason = f"{directory} has no vmlinuz-*"
        except OSError as error:
            newest, reason = None, f"{directory}: {error.strerror or error}"
        facts = {
            "kernel_boot": known(newest, str(directory))
            if newest
            else unknown(reason, str(directory))
        }
        dkms = self.run(["dkms", "status"])
        facts["dkms"] = (
            unknown(tail(dkms), "dkms status")
            if dkms.fault or dkms.code
            else known(parse_dkms(dkms.stdout), "dkms status")
        )
        modinfo = self.run(["modinfo", "nvidia"])
        module = parse_modinfo(modinfo.stdout) if not modinfo.fault else None
        facts["module_installed"] = (
            known(module, "modinfo nvidia") if module else unknown(tail(modinfo), "modinfo nvidia")
        )
        source = "mokutil --sb-state"
        mokutil = self.run(["mokutil", "--sb-state"])
        secure = None if mokutil.fault else parse_secure_boot(mokutil.stdout + mokutil.stderr)
        facts["secure_boot"] = (
            unknown(tail(mokutil), source) if secure is None else known(secure, source)
        )
        return facts

    def os_release(self) -> dict[str, Fact]:
        """The distribution."""
        reasons = []
        for path in (self.root / "etc/os-release", self.root / "usr/lib/os-release"):
            text, reason = read_text(path)
            if text is not None and (values := parse_os_release(text)):
                return {"os_release": known(values, str(path))}
            reasons.append(reason or f"{path} has no assignment")
        return {"os_release": unknown("; ".join(reasons), "os-release")}

    def groups(self, controller: str) -> list[Path]:
        """Directories of the control groups that this process lies in, for one controller.

        A container may have the path of the host in ``/proc/self/cgroup`` and only its own groups
        mounted, so only directories that exist are taken, the mounted root always.
        """
        text, _ = read_text(self.root / "proc/self/cgroup")
        mount = self.root / "sys/fs/cgroup"
        found = []
        for line in (text or "").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                base = mount
            elif controller in controllers.split(","):
                base = mount / controllers
                base = base if base.is_dir() else mount / controller
            else:
                continue
            parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..", ".")]
            found += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        return [path for path in found if path.is_dir()]

    def around(self) -> dict[str, Fact]:
        """What lies around the cards: nodes, toolkits, file systems, the rate of the disk."""
        status, _ = read_text(self.root / "proc/self/status")
        return {
            **machine.numa_nodes(self.root, parse_status_cpus(status or "")),
            **machine.cuda_toolkits(self.root),
            **machine.cuda_link(self.root),
            **machine.container(self.root, self.run),
            **storage.paths(self.root, self.run, self.paths),
            **storage.read_speeds(self.root, self.samples),
        }

    def limits(self) -> dict[str, Fact]:
        """Limits of the control groups: bytes of memory and CPUs, None where there is none."""
        path = self.root / "proc/self/cgroup"
        text, reason = read_text(path)
        if text is None:
            return {"control_groups": unknown(reason, str(path))}
        memory = [
            limit for group in self.groups("memory") if (limit := self._memory_group(group)[0])
        ]
        cpus = [quota for group in self.groups("cpu") if (quota := self._cpu_quota(group))]
        limits = {
            "version": 2 if any(line.startswith("0::") for line in text.splitlines()) else 1,
            "memory_bytes": min(memory, default=None),
            "cpus": min(cpus, default=None),
        }
        return {"control_groups": known(limits, str(path))}

    def _cpu_quota(self, group: Path) -> float | None:
        """CPUs that a group may use, None without a quota."""
        text, _ = read_text(group / "cpu.max")
        if text is not None:
            return parse_cpu_max(text)
        quota, _ = read_text(group / "cpu.cfs_quota_us")
        period, _ = read_text(group / "cpu.cfs_period_us")
        return parse_cpu_max(f"{quota or ''} {period or ''}")

    def cpus(self) -> dict[str, Fact]:
        """CPUs that may be used: online, allowed to this process, within the group's quota."""
        online_path = self.root / "sys/devices/system/cpu/online"
        status_path = self.root / "proc/self/status"
        counts: list[tuple[int, str]] = []
        reasons = []
        for path, parse in ((online_path, parse_cpu_list), (status_path, parse_status_cpus)):
            text, reason = read_text(path)
            cpus = parse(text) if text is not None else None
            if cpus:
                counts.append((len(cpus), str(path)))
            else:
                reasons.append(reason or f"{path} has no list of CPUs")
        if not counts:
            return {"cpu_count": unknown("; ".join(reasons), "cpu lists")}
        for group in self.groups("cpu"):
            quota = self._cpu_quota(group)
            if quota is not None:
                counts.append((max(int(quota), 1), f"CPU quota of {group}"))
        count, source = min(counts)
        return {"cpu_count": known(count, source)}

    def memory(self) -> dict[str, Fact]:
        """RAM in bytes, total and available, both within the control groups' limits."""
        path = self.root / "proc/meminfo"
        text, reason = read_text(path)
        values = parse_meminfo(text or "")
        facts = {}
        for name, key in (
            ("memory_total_bytes", "MemTotal"),
            ("memory_available_bytes", "MemAvailable"),
        ):
            if key not in values:
                facts[name] = unknown(reason or f"{path} has no {key}", str(path))
                continue
            choices = [(values[key], str(path))]
            for group in self.groups("memory"):
                limit, used = self._memory_group(group)
                if limit is not None:
                    left = limit if key == "MemTotal" else max(limit - used, 0)
                    choices.append((left, f"memory limit of {group}"))
            facts[name] = known(*min(choices))
        return facts

    def _memory_group(self, group: Path) -> tuple[int | None, int]:
        """Limit and use of a group in bytes; cached files that can be dropped are not used."""
        for limit_name, used_name, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            text, _ = read_text(group / limit_name)
            if text is None:
                continue
            used, _ = read_text(group / used_name)
            statistics, _ = read_text(group / "memory.stat")
            dropped = parse_statistics(statistics or "").get(cache, 0)
            return parse_limit(text), max((parse_limit(used or "") or 0) - dropped, 0)
        return None, 0

    def facts(self) -> dict[str, dict[str, Any]]:
        """Every fact by name, each as ``value``, ``unknown`` and ``source``."""
        found: dict[str, Fact] = {}
        for probe in (
            self.pci,
            self.smi,
            self.driver,
            self.packages,
            self.apt,
            self.kernel,
            self.boot,
            self.os_release,
            self.cpus,
            self.memory,
            self.limits,
            self.around,
        ):
            found |= probe()
        return {name: asdict(fact) for name, fact in sorted(found.items())}
