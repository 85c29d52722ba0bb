# SPDX-License-Identifier: Apache-2.0
"""Facts from texts in the real tools' formats, and from whole recorded states of boxes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from gpubox import hardware, machine, probe, storage
from gpubox.apt import parse_holds, parse_preferences, parse_simulation, parse_unattended
from gpubox.hardware import (
    Box,
    library_versions,
    newest_kernel,
    normalize_address,
    nvidia_gpus,
    nvswitches,
    parse_cpu_max,
    parse_dkms,
    parse_driver,
    parse_kernel_log,
    parse_limit,
    parse_lspci,
    parse_meminfo,
    parse_modinfo,
    parse_modules,
    parse_os_release,
    parse_packages,
    parse_secure_boot,
    parse_smi,
    parse_smi_xml,
    parse_statistics,
    parse_status_cpus,
    parse_topology,
    read_pci_files,
)
from gpubox.machine import (
    cpu_list,
    iommu_state,
    parse_acs,
    parse_cpu_list,
    parse_node_memory,
    parse_toolkit,
)
from gpubox.probe import Output, read_text, run_command, strip_ansi
from gpubox.storage import mount_of, parse_findmnt, parse_xfs_info
from hypothesis import given
from hypothesis import strategies as st

from tests import boxes
from tests.unit import modules
from tests.unit.timing import AT_ONCE, FOREVER

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3

# --- lspci -Dnn -----------------------------------------------------------------------------------

SERVER_NAME = "NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Server Edition]"
EIGHT = ["16", "27", "38", "5a", "98", "ac", "c8", "d8"]
BOARD = """\
0000:00:00.0 Host bridge [0600]: Intel Corporation Ice Lake Memory Map/VT-d [8086:09a2] (rev 20)
0000:02:00.0 PCI bridge [0604]: ASPEED Technology, Inc. AST1150 PCI-to-PCI Bridge [1a03:1150] (rev 06)
0000:03:00.0 VGA compatible controller [0300]: ASPEED Technology, Inc. ASPEED Graphics Family [1a03:2000] (rev 52)
0000:15:01.0 PCI bridge [0604]: Intel Corporation Device [8086:352a] (rev 04)
"""  # noqa: E501 - as lspci prints it


def cards(addresses: Sequence[str], domain: str = "0000", revision: str = "a1") -> str:
    return "".join(
        f"{domain}:{bus}:00.0 3D controller [0302]: {SERVER_NAME} [10de:2bb5] (rev {revision})\n"
        for bus in addresses
    )


def gpu_addresses(text: str) -> list[str]:
    return [device.address for device in nvidia_gpus(parse_lspci(text))]


def test_reference_box_has_eight_cards_and_no_bmc() -> None:
    found = nvidia_gpus(parse_lspci(BOARD + cards(EIGHT)))
    assert [device.address for device in found] == [f"0000:{bus}:00.0" for bus in EIGHT]
    assert found[0].to_dict() == {
        "address": "0000:16:00.0",
        "class": "0302",
        "device_id": "10de:2bb5",
        "name": SERVER_NAME,
        "revision": "a1",
    }


def test_order_of_lines_does_not_matter() -> None:
    assert gpu_addresses(cards(EIGHT[::-1]) + BOARD) == gpu_addresses(BOARD + cards(EIGHT))


def test_workstation_card_with_its_audio_function() -> None:
    text = """\
0000:01:00.0 VGA compatible controller [0300]: NVIDIA Corporation GB202GL [RTX PRO 6000 Blackwell Workstation Edition] [10de:2bb1] (rev a1)
0000:01:00.1 Audio device [0403]: NVIDIA Corporation GB202 High Definition Audio Controller [10de:22e8] (rev a1)
"""  # noqa: E501 - as lspci prints it
    assert gpu_addresses(BOARD + text) == ["0000:01:00.0"]
    virtual = cards(["16"]) + cards(["16"]).replace(":00.0", ":00.4")  # a virtual function
    assert gpu_addresses(virtual) == ["0000:16:00.0"]


def test_card_without_name_in_the_data_base() -> None:
    (found,) = parse_lspci(
        "0000:16:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev a1)\n"
    )
    assert (found.name, found.device_id) == ("NVIDIA Corporation Device", "2bb5")


def test_card_off_the_bus_is_there_with_revision_ff() -> None:
    text = cards(EIGHT[:5]) + cards([EIGHT[5]], revision="ff") + cards(EIGHT[6:])
    found = nvidia_gpus(parse_lspci(text))
    assert [device.address for device in found if device.revision == "ff"] == ["0000:ac:00.0"]
    assert len(found) == 8


def test_domains_are_kept() -> None:
    text = cards(["16"]) + cards(["16"], "0001") + cards(["01"], "10000")
    assert gpu_addresses(text) == ["0000:16:00.0", "0001:16:00.0", "10000:01:00.0"]


def test_nvlink_box_has_switches() -> None:
    text = """\
0000:05:00.0 Bridge [0680]: NVIDIA Corporation GH100 [H100 NVSwitch] [10de:22a3] (rev a1)
0000:18:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H200 SXM 141GB] [10de:2335] (rev a1)
"""
    devices = parse_lspci(text)
    assert [device.address for device in nvswitches(devices)] == ["0000:05:00.0"]
    assert [device.address for device in nvidia_gpus(devices)] == ["0000:18:00.0"]
    assert nvswitches(parse_lspci(BOARD + cards(EIGHT))) == []


def test_colour_codes_are_no_part_of_a_line() -> None:
    line = cards(["16"])
    assert gpu_addresses(f"\x1b[4m\x1b[1;31m{line.strip()}\x1b[0m\n") == ["0000:16:00.0"]
    assert strip_ansi("\x1b[4mGPU0\x1b[0m\x1b(B") == "GPU0"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:16:00.0", "0000:16:00.0"),
        ("00000001:C8:00.0", "0001:c8:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0000:AC:00.0", "0000:ac:00.0"),
        ("16:00.0", "0000:16:00.0"),
        (" 0000:16:1f.7 ", "0000:16:1f.7"),
        ("0000:16:00.8", None),
        ("0000:16:00", None),
        ("", None),
        ("GPU-16:00.0", None),
    ],
)
def test_addresses(text: str, address: str | None) -> None:
    assert normalize_address(text) == address


def pci_files(root: Path, *devices: tuple[str, str, str, str]) -> Path:
    """Devices as the kernel shows them in /sys."""
    directory = root / "sys/bus/pci/devices"
    directory.mkdir(parents=True, exist_ok=True)
    for address, vendor, device, kind in devices:
        entry = directory / address
        entry.mkdir()
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            (entry / name).write_text(f"0x{value}\n")
        (entry / "revision").write_text("0xa1\n")
    return directory


def test_files_of_the_kernel_tell_the_same(tmp_path: Path) -> None:
    directory = pci_files(
        tmp_path,
        ("0001:16:00.0", "10de", "2bb5", "030200"),
        ("0000:16:00.0", "10de", "2bb5", "030200"),
        ("0000:01:00.1", "10de", "22e8", "040300"),
        ("0000:03:00.0", "1a03", "2000", "030000"),
    )
    (directory / "0000:aa:00.0").mkdir()  # vanished while it was read
    (directory / "rubbish").mkdir()
    found = nvidia_gpus(read_pci_files(directory))
    assert [device.to_dict() for device in found] == [
        {
            "address": address,
            "class": "0302",
            "device_id": "10de:2bb5",
            "name": None,
            "revision": "a1",
        }
        for address in ("0000:16:00.0", "0001:16:00.0")
    ]


# --- nvidia-smi -----------------------------------------------------------------------------------

SMI_HEADER = "index, pci.bus_id, name, uuid, memory.total [MiB], compute_cap, driver_version\n"
CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def smi(addresses: Sequence[str], domain: str = "00000000", memory: str = "97887 MiB") -> str:
    return SMI_HEADER + "".join(
        f"{index}, {domain}:{bus.upper()}:00.0, {CARD}, "
        f"GPU-00000000-0000-0000-0000-0000000000{bus}, {memory}, 12.0, 590.48.01\n"
        for index, bus in enumerate(addresses)
    )


def test_smi_of_the_reference_box() -> None:
    found, messages = parse_smi(smi(EIGHT))
    assert found is not None
    assert [card.address for card in found] == [f"0000:{bus}:00.0" for bus in EIGHT]
    assert {card.memory_total_mib for card in found} == {97887}
    assert (found[7].index, found[7].name) == (7, CARD)
    assert (found[0].compute_capability, found[0].driver_version) == ("12.0", "590.48.01")
    assert messages == []


def test_smi_matches_lspci_in_two_domains() -> None:
    text = smi(["16"]) + smi(["16"], "00000001").removeprefix(SMI_HEADER)
    found, _ = parse_smi(text)
    assert found is not None
    assert [card.address for card in found] == gpu_addresses(cards(["16"], "0001") + cards(["16"]))


def test_smi_order_does_not_matter() -> None:
    found, _ = parse_smi(smi(EIGHT[::-1]))
    assert found is not None
    assert [card.address for card in found] == [f"0000:{bus}:00.0" for bus in EIGHT]
    assert [card.index for card in found] == list(range(7, -1, -1))


def test_values_that_are_none() -> None:
    row = "0, 00000000:16:00.0, [Unknown Error], [N/A], [N/A], N/A, [GPU is lost]\n"
    found, messages = parse_smi(SMI_HEADER + row)
    assert found == [hardware.Gpu(0, "0000:16:00.0", None, None, None, None, None)]
    assert messages == []


def test_lost_card_between_the_rows() -> None:
    lost = "Unable to determine the device handle for GPU5: 0000:AC:00.0: Unknown Error"
    rows = smi(EIGHT).splitlines(keepends=True)
    rows[6] = lost + "\n"
    found, messages = parse_smi("".join(rows))
    assert found is not None
    assert len(found) == 7
    assert messages == [lost]


def test_only_words_say_that_there_are_no_cards() -> None:
    assert parse_smi("No devices were found\n") == ([], ["No devices were found"])
    assert parse_smi("") == (None, [])
    assert parse_smi(SMI_HEADER) == (None, [])
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    assert parse_smi(failed) == (None, [failed])


def test_smi_with_colour_codes() -> None:
    found, messages = parse_smi(smi(["16"]).replace("index", "\x1b[4mindex\x1b[0m"))
    assert found is not None
    assert len(found) == 1
    assert messages == []


FULL_HEADER = (
    SMI_HEADER.strip()
    + ", memory.used [MiB], pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.current,"
    " pcie.link.width.max, ecc.mode.current, ecc.mode.pending, mig.mode.current, mig.mode.pending\n"
)


def full_smi(
    addresses: Sequence[str], more: str = "4 MiB, 1, 5, 16, 16, Disabled, Disabled"
) -> str:
    """The whole query of the reference box; idle cards run their links at generation 1."""
    rows = smi(addresses).splitlines()[1:]
    return FULL_HEADER + "".join(f"{row}, {more}, Disabled, Disabled\n" for row in rows)


def test_links_modes_and_memory() -> None:
    found, messages = parse_smi(full_smi(["16"], "90112 MiB, 5, 5, 8, 16, Enabled, Disabled"))
    assert found is not None
    (card,) = found
    assert (card.pcie_generation, card.pcie_generation_max) == (5, 5)
    assert (card.pcie_width, card.pcie_width_max) == (8, 16)
    assert (card.ecc_current, card.ecc_pending) == ("enabled", "disabled")
    assert (card.mig_current, card.mig_pending) == ("disabled", "disabled")
    assert card.memory_used_mib == 90112
    assert messages == []
    found, _ = parse_smi(full_smi(["16"], "[N/A], [N/A], 5, [Unknown Error], 16, [N/A], [N/A]"))
    assert found is not None
    assert (found[0].memory_used_mib, found[0].pcie_width, found[0].ecc_current) == (None,) * 3


def test_a_driver_that_does_not_know_a_field_is_asked_for_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(tmp_path, "reference-2")
    cat = shutil.which("cat")
    recorded.command(
        "nvidia-smi",
        'case "$*" in\n'
        "*mig.mode*) echo 'Field \"mig.mode.current\" is not a valid field to query.'; exit 2 ;;\n"
        f"*query-gpu*) {cat} <<'END'\n{smi(EIGHT[:2])}END\n;;\nesac",
    )
    facts = recorded.facts(monkeypatch)
    assert [card["memory_total_mib"] for card in facts["gpus"]["value"]] == [97887, 97887]
    assert facts["gpus"]["value"][0]["mig_current"] is None


LOG = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
\t<cuda_version>13.1</cuda_version>
\t<attached_gpus>2</attached_gpus>
{cards}
</nvidia_smi_log>
"""


def log_card(bus: str, *processes: tuple[str, str, str, str]) -> str:
    names = ("pid", "type", "process_name", "used_memory")
    told = [
        "".join(f"<{name}>{text}</{name}>" for name, text in zip(names, one, strict=True))
        for one in processes
    ]
    inner = "".join(f"<process_info>{one}</process_info>" for one in told)
    return f'<gpu id="00000000:{bus}:00.0"><processes>{inner}</processes></gpu>'


def test_processes_that_hold_memory() -> None:
    python = "/opt/gpubox/environments/x/venv/bin/python3"
    cards = log_card("D8", ("4711", "C", python, "90110 MiB"), ("x", "C", "odd", "1 MiB"))
    cards += log_card("16", ("12", "C+G", "[Not Found]", "N/A"), ("7", "G", "/a &amp; b", "4 MiB"))
    text = LOG.format(cards=cards)
    assert parse_smi_xml(LOG.format(cards="")) == ("13.1", [])
    names = ("address", "pid", "kind", "name", "memory_used_mib")
    found = parse_smi_xml(text)
    assert found is not None
    assert [tuple(one[name] for name in names) for one in found[1]] == [
        ("0000:16:00.0", 7, "G", "/a & b", 4),
        ("0000:16:00.0", 12, "C+G", None, None),
        ("0000:d8:00.0", 4711, "C", python, 90110),
    ]
    # a lost card is named before the document, and colours are met
    assert parse_smi_xml(f"Unable to determine the device handle for GPU5\n{text}\n") == found
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa">]>' + text.partition("\n")[2].partition("\n")[2]
    assert parse_smi_xml(bomb) == found
    for broken in ("", text[:-30], text.replace("</gpu>", ""), text.replace("12", "&a;")):
        assert parse_smi_xml(broken) is None


def test_the_kernels_words_and_other_drivers() -> None:
    log = "[  1.5] NVRM: GPU 0000:ac:00.0: RmInitAdapter failed!\n[  1.6] usb 1-1: new\n"
    assert parse_kernel_log(log) == ["GPU 0000:ac:00.0: RmInitAdapter failed!"]
    assert len(parse_kernel_log(log * 1000)) == 64
    modules_ = "nouveau 3096576 0 - Live 0x0\nmxm_wmi 12288 1 nouveau, Live 0x0\n"
    assert parse_modules(modules_) == ["nouveau"]
    assert parse_modules("nvidia 14442496 3 nouveau, Live 0x0\n") == []


def topology(count: int, cell: Callable[[int, int], str] | None = None) -> str:
    """``nvidia-smi topo -m`` of ``count`` cards, half of them on each of two sockets."""

    def of_the_box(row: int, column: int) -> str:
        if row == column:
            return " X "
        return "NODE" if (row < count / 2) == (column < count / 2) else "SYS"

    cell = cell or of_the_box
    names = [f"GPU{number}" for number in range(count)]
    text = "\t" + "\x1b[4m" + "\t".join([*names, "NIC0", "CPU Affinity"])
    text += "\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    for row, name in enumerate(names):
        node = int(row >= count / 2)
        cells = [cell(row, column) for column in range(count)]
        text += "\t".join([name, *cells, "SYS", f"{node * 32}-{node * 32 + 31}", str(node), "N/A"])
        text += "\n"
    text += "NIC0\t" + "\t".join(["SYS"] * count) + "\t X \t\t\t\n"
    return text + "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"


def by_index(count: int) -> dict[int, str]:
    return {number: f"0000:{bus}:00.0" for number, bus in enumerate(EIGHT[:count])}


def test_topology_of_the_reference_box() -> None:
    found = parse_topology(topology(8), by_index(8))
    assert found is not None
    first = found["0000:16:00.0"]
    assert first["0000:27:00.0"] == "pcie_socket"
    assert first["0000:98:00.0"] == "pcie_cross_socket"
    assert "0000:16:00.0" not in first
    assert all(found[b][a] == link for a, row in found.items() for b, link in row.items())


def test_topology_of_other_boxes() -> None:
    nvlink = topology(8, lambda row, column: " X " if row == column else "NV18")
    found = parse_topology(nvlink, by_index(8))
    assert found is not None
    assert {link for row in found.values() for link in row.values()} == {"nvlink"}
    switch = topology(2, lambda row, column: " X " if row == column else "PIX")
    assert parse_topology(switch, by_index(2)) == {
        "0000:16:00.0": {"0000:27:00.0": "pcie_switch"},
        "0000:27:00.0": {"0000:16:00.0": "pcie_switch"},
    }
    assert parse_topology(topology(1), by_index(1)) == {"0000:16:00.0": {}}
    # the matrix follows nvidia-smi's index, and a card without an address has no row
    shuffled = parse_topology(topology(2), {0: "0000:27:00.0", 1: "0000:16:00.0"})
    assert shuffled is not None
    assert list(shuffled) == ["0000:27:00.0", "0000:16:00.0"]
    assert parse_topology(topology(2), {0: "0000:16:00.0"}) == {"0000:16:00.0": {}}
    assert parse_topology("No devices were found\n", {}) is None


# --- what the next boot brings --------------------------------------------------------------------

DKMS = "nvidia/590.48.01, 6.14.0-37-generic, x86_64: installed\n"
MODINFO = """\
filename:       /lib/modules/6.14.0-37-generic/updates/dkms/nvidia.ko.zst
alias:          char-major-195-*
version:        590.48.01
supported:      external
license:        Dual MIT/GPL
firmware:       nvidia/590.48.01/gsp_tu10x.bin
sig_id:         PKCS#7
signer:         box Secure Boot Module Signature key
"""


def test_dkms_in_both_forms() -> None:
    old = "nvidia, 535.129.03, 5.15.0-91-generic, x86_64: installed (WARNING! Diff!)\n"
    added = "zfs/2.2.2: added\n"
    found = parse_dkms(DKMS + old + added + "Error! something\n")
    assert found.pop() == {"module": "zfs", "version": "2.2.2", "kernel": "", "state": "added"}
    assert [tuple(module.values()) for module in found] == [
        ("nvidia", "590.48.01", "6.14.0-37-generic", "installed"),
        ("nvidia", "535.129.03", "5.15.0-91-generic", "installed"),
    ]


def test_modinfo() -> None:
    assert parse_modinfo(MODINFO) == {
        "version": "590.48.01",
        "flavour": "open",
        "signer": "box Secure Boot Module Signature key",
    }
    proprietary = parse_modinfo("version:        550.90.07\nlicense:        NVIDIA\n")
    assert proprietary == {"version": "550.90.07", "flavour": "proprietary", "signer": ""}
    assert parse_modinfo("modinfo: ERROR: Module nvidia not found.\n") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SecureBoot enabled\n", True),
        ("SecureBoot disabled\nPlatform is in Setup Mode\n", False),
        ("EFI variables are not supported on this system\n", False),
        ("This system doesn't support Secure Boot\n", False),
        ("Cannot determine secure boot state.\n", None),
        ("", None),
    ],
)
def test_secure_boot(text: str, expected: bool | None) -> None:
    assert parse_secure_boot(text) is expected


def test_the_newest_kernel_is_the_next_one() -> None:
    names = ["vmlinuz-6.8.0-9-generic", "vmlinuz-6.8.0-90-generic", "vmlinuz", "initrd.img-7.0.0"]
    assert newest_kernel(names) == "6.8.0-90-generic"
    assert newest_kernel([*names, "vmlinuz-6.14.0-37-generic"]) == "6.14.0-37-generic"
    assert newest_kernel(["vmlinuz", "vmlinuz-"]) is None


# --- driver ---------------------------------------------------------------------------------------

OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build  (dvs-builder@U22-I3-AE18-23-3)  Mon Dec  8 12:30:02 UTC 2025
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""  # noqa: E501 - as the module prints it
PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


def test_loaded_driver() -> None:
    assert parse_driver(OPEN) == hardware.KernelDriver("590.48.01", "open")
    assert parse_driver(PROPRIETARY) == hardware.KernelDriver("550.90.07", "proprietary")
    assert parse_driver("NVRM version: something else\n") is None
    assert parse_driver("GCC version:  gcc version 12.3.0 535.1.1\n") is None
    two_parts = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157  Wed Oct 12 09:19:07 UTC"
    assert parse_driver(two_parts) == hardware.KernelDriver("390.157", "proprietary")


UBUNTU = """\
libnvidia-compute-580-server\t580.95.05-0ubuntu0.24.04.2\tinstalled
libnvidia-compute-570-server\t570.133.20-0ubuntu0.24.04.1\tconfig-files
linux-modules-nvidia-580-server-open-6.14.0-37-generic\t6.14.0-37.37~24.04.1\tinstalled
nvidia-driver-580-server-open\t580.95.05-0ubuntu0.24.04.2\tinstalled
nvidia-dkms-535\t\tnot-installed
"""
REPOSITORY = """\
libnvidia-compute\t590.48.01-1ubuntu1\tinstalled
nvidia-open\t590.48.01-1ubuntu1\tinstalled
"""
DEBIAN = "libnvidia-ml1:amd64\t1:550.163.01-2\tinstalled\n"


def test_packages() -> None:
    found = parse_packages(UBUNTU)
    assert [package["package"] for package in found] == [
        "libnvidia-compute-580-server",
        "linux-modules-nvidia-580-server-open-6.14.0-37-generic",
        "nvidia-driver-580-server-open",
    ]
    assert library_versions(found) == ["580.95.05"]
    assert library_versions(parse_packages(REPOSITORY)) == ["590.48.01"]
    assert library_versions(parse_packages(DEBIAN)) == ["550.163.01"]
    assert library_versions(parse_packages(UBUNTU + REPOSITORY)) == ["580.95.05", "590.48.01"]
    assert parse_packages("") == []


# --- memory, CPUs, system -------------------------------------------------------------------------

MEMINFO = """\
MemTotal:       452984832 kB
MemFree:         8123456 kB
MemAvailable:   440401920 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
"""


def test_meminfo_in_bytes() -> None:
    found = parse_meminfo(MEMINFO)
    assert found["MemTotal"] == 432 * GIB
    assert found["MemAvailable"] == 420 * GIB
    assert "HugePages_Total" not in found


def test_limits() -> None:
    assert parse_limit("max\n") is None
    assert parse_limit("8589934592\n") == 8 * GIB
    assert parse_cpu_max("max 100000\n") is None
    assert parse_cpu_max("150000 100000\n") == 1.5
    assert parse_cpu_max("-1 100000") is None
    assert parse_cpu_max("100000 0") is None
    assert parse_statistics("inactive_file 4096\nanon 12\nbad\n") == {
        "inactive_file": 4096,
        "anon": 12,
    }


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("") is None
    assert parse_cpu_list("all") is None
    assert parse_status_cpus("Name:\tx\nCpus_allowed_list:\t0-1\n") == {0, 1}
    assert parse_status_cpus("Name:\tx\n") is None


NOBLE = """\
PRETTY_NAME="Ubuntu 24.04.3 LTS"
ID=ubuntu
ID_LIKE=debian
VERSION_ID="24.04"
# a comment
ODD='a b'
ESCAPED="a \\"b\\" \\$c"
lower=no
"""


def test_os_release() -> None:
    assert parse_os_release(NOBLE) == {
        "PRETTY_NAME": "Ubuntu 24.04.3 LTS",
        "ID": "ubuntu",
        "ID_LIKE": "debian",
        "VERSION_ID": "24.04",
        "ODD": "a b",
        "ESCAPED": 'a "b" $c',
    }


def links(text: str) -> dict[str, dict[str, str]] | None:
    return parse_topology(text, by_index(2))


# --- what lies around the cards -------------------------------------------------------------------


def test_acs() -> None:
    verbose = boxes.read("no-driver").commands["lspci"]["-Dvvv"][1]
    found = parse_acs(verbose)
    assert found is not None
    assert found[:2] == ["0000:15:01.0", "0000:26:01.0"]
    assert parse_acs(verbose.replace("ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl", "")) == []
    denied = "0000:15:01.0 PCI bridge: Intel\n\tCapabilities: <access denied>\n"
    assert parse_acs(denied) is None
    assert parse_acs("") is None


def test_iommu_states() -> None:
    assert iommu_state(["DMA-FQ", "identity"]) == "on"
    assert iommu_state(["DMA"]) == "on"
    assert iommu_state(["identity"]) == "passthrough"
    assert iommu_state(["blocked", ""]) is None


def test_the_iommu_of_the_cards_decides(tmp_path: Path) -> None:
    groups = tmp_path / "sys/kernel/iommu_groups"
    groups.mkdir(parents=True)
    assert machine.iommu(tmp_path, [])["iommu"].value == "off"
    for group, kind in (("0", "DMA-FQ"), ("1", "identity")):
        (groups / group).mkdir()
        (groups / group / "type").write_text(f"{kind}\n")
    (groups / "1/devices/0000:16:00.0").mkdir(parents=True)
    assert machine.iommu(tmp_path, ["0000:16:00.0"])["iommu"].value == "passthrough"
    assert machine.iommu(tmp_path, ["0000:27:00.0"])["iommu"].value == "on"


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_are_read_as_they_are_written(cpus: set[int]) -> None:
    assert parse_cpu_list(cpu_list(cpus)) == (cpus or None)


def test_cpus_of_a_node_are_those_that_may_be_used(tmp_path: Path) -> None:
    node = tmp_path / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node.parent / "has_cpu").write_text("1\n")
    (node / "cpulist").write_text("32-63\n")
    (node / "meminfo").write_text("Node 1 MemTotal:       1024 kB\n")
    (found,) = machine.numa_nodes(tmp_path, {0, 33, 34})["numa_nodes"].value
    assert found == {"node": 1, "cpus": "33-34", "memory_total_bytes": 1024**2}
    (found,) = machine.numa_nodes(tmp_path, None)["numa_nodes"].value
    assert found["cpus"] == "32-63"


def test_toolkits_without_a_version_file_have_the_name_of_their_folder(tmp_path: Path) -> None:
    (tmp_path / "usr/local/cuda-12.8").mkdir(parents=True)
    (tmp_path / "usr/local/cuda").symlink_to("cuda-12.8")
    assert machine.cuda_toolkits(tmp_path)["cuda_toolkits"].value == [
        {"toolkit": "12.8", "version": "12.8", "compiler": False}
    ]


@pytest.mark.parametrize(
    ("links", "kind", "target"),
    [
        ({}, "none", None),
        ({"usr/local/cuda": "cuda-12.8"}, "link", "/usr/local/cuda-12.8"),
        (
            {
                "usr/local/cuda": "/etc/alternatives/cuda",
                "etc/alternatives/cuda": "/usr/local/cuda-12.8",
            },
            "alternative",
            "/usr/local/cuda-12.8",
        ),
        ({"usr/local/cuda": "/usr/local/cuda-9.9"}, "link", None),
        ({"usr/local/cuda": "cuda"}, "link", None),  # round and round
        ({"usr/local/cuda": "../../../etc"}, "link", "/etc"),  # no way out of the root
    ],
)
def test_where_the_link_of_cuda_leads(
    tmp_path: Path, links: dict[str, str], kind: str, target: str | None
) -> None:
    for folder in ("usr/local/cuda-12.8", "etc/alternatives"):
        (tmp_path / folder).mkdir(parents=True)
    for name, to in links.items():
        (tmp_path / name).symlink_to(to)
    assert machine.cuda_link(tmp_path)["cuda_link"].value == {
        "kind": kind,
        "target": target,
        "alternative": "etc/alternatives/cuda" in links,
    }


def findmnt(*rows: tuple[str, str]) -> str:
    return json.dumps(
        {"filesystems": [{"target": a, "fstype": b, "size": "7", "avail": 3} for a, b in rows]}
    )


def test_the_mount_of_a_path_is_the_one_that_is_seen() -> None:
    mounts = parse_findmnt(findmnt(("/", "ext4"), ("/srv", "xfs"), ("/srv2", "nfs4")))
    assert mounts is not None
    assert (mounts[0].size_bytes, mounts[0].free_bytes) == (7, 3)  # text in older versions

    def kind(path: str, mounts: list[storage.Mount]) -> str:
        found = mount_of(mounts, path)
        assert found is not None
        return found.file_system

    assert [kind(path, mounts) for path in ("/", "/srv/a/b", "/srv2", "/srv3", "/sr")] == [
        "ext4",
        "xfs",
        "nfs4",
        "ext4",
        "ext4",
    ]
    over = parse_findmnt(findmnt(("/", "ext4"), ("/srv", "xfs"), ("/srv", "btrfs")))
    assert over is not None
    assert kind("/srv/a", over) == "btrfs"
    for wrong in ("", "[]", '{"filesystems": 7}', '{"filesystems": [7, {}]}', "[" * 100000):
        assert parse_findmnt(wrong) is None


@given(st.lists(st.text(max_size=300), max_size=3))
def test_any_path_is_taken(names: list[str]) -> None:
    mounts = '{"filesystems": [{"target": "/", "source": "/dev/sda1", "fstype": "ext4"}]}'
    wanted = [f"/{name}" for name in names]
    found = storage.paths(Path("/"), lambda _: Output(stdout=mounts), wanted)["paths"].value
    assert set(found) <= {str(PurePosixPath(path)) for path in wanted}
    for path in wanted:
        assert storage.read_speeds(Path("/"), [path + "\0"])["read_speeds"].value is None
        assert read_text(Path(path + "\0"))[0] is None


def test_a_partition_turns_as_its_disk_does(tmp_path: Path) -> None:
    disk = tmp_path / "sys/devices/sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue/rotational").write_text("1\n")
    (disk / "sda1").mkdir()
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/8:1").symlink_to("../../devices/sda/sda1")
    row = [{"target": "/", "fstype": "ext4", "maj:min": "8:1"}]
    found = storage.paths(tmp_path, lambda _: Output(json.dumps({"filesystems": row})), ["/srv"])[
        "paths"
    ].value
    assert found["/srv"]["rotational"] is True
    assert found["/srv"]["free_bytes"] is None


@pytest.mark.parametrize("folder", ["", "/dev/shm"])  # noqa: S108 - a tmpfs has no direct reads
def test_the_rate_of_a_disk_is_read_and_nothing_written(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SAMPLE_SMALLEST", 1 << 20)
    root = tmp_path
    if folder:
        if not os.access(folder, os.W_OK):
            pytest.skip(f"no {folder}")
        root = Path(tempfile.mkdtemp(dir=folder))
    (root / "small").write_bytes(b"x")
    (root / "model").write_bytes(os.urandom(1 << 21))
    before = (root / "model").stat()
    found = storage.read_speeds(root, ["/none", "/small", "/model"])["read_speeds"]
    assert list(found.value) == ["/model"]
    assert found.value["/model"] > 0
    after = (root / "model").stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    few = storage.read_speeds(root, ["/none", "/small"])["read_speeds"]
    assert few.value is None
    assert "none is no file of 1 MiB or more" in str(few.unknown)
    shutil.rmtree(root)


def test_the_measurement_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(storage, "SAMPLE_SECONDS", FOREVER)
    path = tmp_path / "model"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)
    assert storage.read_speed(path)
    assert len(reads) * (8 << 20) == storage.SAMPLE_BYTES
    assert reads[0] > 1 << 38  # not where everybody reads


PARSERS: list[Callable[[str], Any]] = [
    parse_holds,
    parse_preferences,
    parse_simulation,
    parse_unattended,
    strip_ansi,
    normalize_address,
    parse_lspci,
    parse_smi,
    parse_driver,
    parse_packages,
    parse_meminfo,
    parse_os_release,
    parse_cpu_list,
    parse_status_cpus,
    parse_limit,
    parse_cpu_max,
    parse_statistics,
    parse_smi_xml,
    parse_kernel_log,
    parse_modules,
    parse_dkms,
    parse_modinfo,
    parse_secure_boot,
    links,
    parse_acs,
    parse_node_memory,
    parse_toolkit,
    parse_findmnt,
    parse_xfs_info,
]
REAL = [BOARD, cards(["16"]), smi(["16"]), OPEN, UBUNTU, MEMINFO, NOBLE, "0-3,8", "150000 100000"]
REAL += [
    text for answers in boxes.read("no-driver").commands.values() for _, text in answers.values()
]
REAL += [full_smi(["16"]), topology(2), DKMS, MODINFO]
REAL += [boxes.read("reference-2").files["etc/apt/preferences.d/nvidia-driver"]]
REAL += [boxes.read("reference-2").commands["nvidia-smi"]["-q -x"][1]]
REAL += [LOG.format(cards=log_card("16", ("12", "C", "x", "4 MiB")))]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real text with a piece replaced by anything."""
    text = draw(st.sampled_from(REAL))
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, len(text)))
    return text[:start] + draw(st.text(max_size=20)) + text[end:]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.__name__)
@given(text=st.one_of(st.text(), damaged()))
def test_any_text_is_taken(parser: Callable[[str], Any], text: str) -> None:
    parser(text)


@given(st.one_of(st.text(), damaged()))
def test_any_output_gives_facts(text: str) -> None:
    box = Box(Path("/nonexistent"), lambda _: Output(text, text, 1))
    for fact in box.facts().values():
        assert set(fact) == {"value", "unknown", "source"}
        assert (fact["unknown"] is None) == (fact["value"] is not None)
    # no answer is never "none": an empty list needs words that say so
    gpus = box.facts()["gpus"]["value"]
    assert gpus != [] or "No devices were found" in strip_ansi(text)


# --- whole boxes ----------------------------------------------------------------------------------

NAMES = {
    "apt_holds",
    "apt_pins",
    "apt_simulation",
    "cuda_link",
    "packages_missing",
    "unattended_upgrades",
    "acs_redirecting",
    "architecture",
    "container",
    "control_groups",
    "cuda_toolkits",
    "iommu",
    "numa_nodes",
    "paths",
    "read_speeds",
    "cpu_count",
    "driver_cuda_max",
    "driver_flavour",
    "driver_gpus",
    "driver_installed",
    "driver_loaded",
    "driver_packages",
    "dkms",
    "gpu_links",
    "gpu_processes",
    "kernel_messages",
    "other_drivers",
    "gpus",
    "kernel_boot",
    "kernel_running",
    "memory_available_bytes",
    "memory_total_bytes",
    "module_installed",
    "nvidia_devices",
    "nvidia_smi_messages",
    "nvswitch_devices",
    "os_release",
    "secure_boot",
}


class Recorded:
    """A recorded box (tests/boxes) that a test may change."""

    def __init__(self, directory: Path, name: str = "bmc-vga") -> None:
        self.root, self.bin = boxes.unpack(name, directory / name)

    def file(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n# stand-in for {name}\n{script}\n")
        path.chmod(0o755)

    def facts(self, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Any]:
        monkeypatch.setenv("PATH", str(self.bin))
        facts = Box(self.root, **more).facts()
        assert set(facts) == NAMES
        return facts


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


WANTED = ["python3-venv", "gcc", "g++", "libc6-dev", "libnuma1", "python3-dev"]
PATHS = ["/opt/gpubox", "/shared/glm5-gguf", "/dev/shm"]  # noqa: S108


@pytest.mark.parametrize(
    ("name", "addresses", "memory"),
    [("reference-8", EIGHT, (432, 428)), ("reference-2", EIGHT[:2], (288, 285))],
)
def test_reference_box(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    addresses: list[str],
    memory: tuple[int, int],
) -> None:
    recorded = Recorded(tmp_path, name)
    monkeypatch.setattr(storage, "SAMPLE_SMALLEST", 1)
    recorded.file("shared/glm5-gguf/model.gguf", "GGUF" * 4096)
    facts = recorded.facts(
        monkeypatch, paths=PATHS, samples=["/shared/glm5-gguf/model.gguf"], packages=WANTED
    )
    full = [f"0000:{bus}:00.0" for bus in addresses]
    assert [device["address"] for device in facts["nvidia_devices"]["value"]] == full
    assert [card["address"] for card in facts["gpus"]["value"]] == full
    assert facts["driver_gpus"]["value"] == full
    assert facts["nvidia_smi_messages"]["value"] == []
    assert facts["nvswitch_devices"]["value"] == []
    values = {name: fact["value"] for name, fact in facts.items()}
    assert values["driver_loaded"] == values["driver_installed"] == "590.48.01"
    assert values["driver_flavour"] == "open"
    assert values["gpus"][0]["pcie_generation_max"] == 5
    assert values["gpu_processes"] == []
    assert values["driver_cuda_max"] == "13.1"
    assert values["other_drivers"] == []
    assert [line[:14] for line in values["kernel_messages"]] == ["loading NVIDIA"]
    assert values["kernel_boot"] == "6.14.0-37-generic"
    assert [module["kernel"] for module in values["dkms"]] == ["6.14.0-37-generic"]
    assert values["module_installed"]["version"] == "590.48.01"
    assert values["secure_boot"] is False
    assert set(values["gpu_links"]) == set(full)
    far = "pcie_cross_socket" if len(full) == 8 else "pcie_socket"
    assert values["gpu_links"][full[0]][full[-1]] == far
    assert values["kernel_running"] == "6.14.0-37-generic"
    assert values["architecture"] == "x86_64"
    assert values["cpu_count"] == 64
    assert values["memory_total_bytes"] == memory[0] * GIB
    assert values["memory_available_bytes"] == memory[1] * GIB
    assert values["os_release"]["ID"] == "ubuntu"
    assert [device["numa_node"] for device in values["nvidia_devices"]] == [
        int(int(bus, 16) >= 0x80) for bus in addresses
    ]
    assert [node["cpus"] for node in values["numa_nodes"]] == ["0-31", "32-63"]
    assert sum(node["memory_total_bytes"] for node in values["numa_nodes"]) == memory[0] * GIB
    assert values["iommu"] == "passthrough"
    assert values["acs_redirecting"] == []
    assert values["control_groups"] == {"version": 2, "memory_bytes": None, "cpus": None}
    assert [one["version"] for one in values["cuda_toolkits"]] == ["13.0.2", "13.1.0"]
    assert all(one["compiler"] for one in values["cuda_toolkits"])
    assert values["container"] == "none"
    assert values["cuda_link"] == {
        "kind": "alternative",
        "target": "/usr/local/cuda-13.1",
        "alternative": True,
    }
    assert values["apt_holds"] == []
    assert values["apt_pins"][0]["pin"] == "version 590.48.01*"
    assert values["unattended_upgrades"] == {"enabled": True, "spared": []}
    assert values["packages_missing"] == ["python3-venv", "python3-dev"]
    assert len(values["apt_simulation"]) == 4
    shared = values["paths"]["/shared/glm5-gguf"]
    assert shared == {
        "mount": "/shared",
        "device": "/dev/md0",
        "number": "9:0",
        "file_system": "xfs",
        "size_bytes": 15300 * 10**9,
        "free_bytes": 12000 * 10**9,
        "read_only": False,
        "noexec": False,
        "reflink": True,
        "rotational": False,
    }
    assert values["paths"]["/opt/gpubox"]["mount"] == "/"
    assert values["paths"]["/opt/gpubox"]["reflink"] is False
    assert values["paths"]["/dev/shm"]["size_bytes"] == memory[0] * GIB // 2  # noqa: S108
    assert list(values["read_speeds"]) == ["/shared/glm5-gguf/model.gguf"]
    assert all(fact["unknown"] is None for fact in facts.values())


def test_driver_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Recorded(tmp_path, "driver-mismatch").facts(monkeypatch)
    assert facts["driver_loaded"]["value"] == "590.44.01"
    assert facts["driver_installed"]["value"] == "590.48.01"
    assert facts["gpus"]["value"] is None
    assert "version mismatch" in facts["gpus"]["unknown"]
    assert "exit status 18" in facts["gpus"]["unknown"]


def test_card_off_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Recorded(tmp_path, "seven").facts(monkeypatch)
    assert len(facts["nvidia_devices"]["value"]) == 8
    assert facts["nvidia_devices"]["value"][5]["revision"] == "ff"
    assert len(facts["gpus"]["value"]) == 7
    lost = "Unable to determine the device handle for GPU5: 0000:AC:00.0: Unknown Error"
    assert facts["nvidia_smi_messages"]["value"] == [lost]
    assert "GPU has fallen off the bus." in facts["kernel_messages"]["value"][-1]


def test_cards_without_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Recorded(tmp_path, "no-driver").facts(monkeypatch)
    assert len(facts["nvidia_devices"]["value"]) == 8
    assert facts["gpus"]["unknown"] == "nvidia-smi is not installed"
    assert "not loaded" in facts["driver_loaded"]["unknown"]
    assert facts["driver_installed"]["unknown"] == "no driver library is installed as a package"
    assert facts["driver_packages"]["value"] == []
    assert facts["iommu"]["value"] == "on"
    assert len(facts["acs_redirecting"]["value"]) == 8
    assert facts["acs_redirecting"]["value"][0] == "0000:15:01.0"
    assert facts["cuda_toolkits"]["value"] == []
    assert facts["secure_boot"]["value"] is True
    assert facts["other_drivers"]["value"] == ["nouveau"]


def test_container_without_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(tmp_path, "container")
    pci_files(recorded.root, ("0000:16:00.0", "10de", "2bb5", "030200"))
    facts = recorded.facts(monkeypatch, paths=["/dev/shm", "/tmp/x"])  # noqa: S108
    assert facts["nvidia_devices"]["value"][0]["device_id"] == "10de:2bb5"
    assert facts["nvidia_devices"]["source"].endswith("sys/bus/pci/devices")
    assert facts["driver_packages"]["unknown"] == "dpkg-query is not installed"
    assert facts["container"]["value"] == "podman"
    assert facts["control_groups"]["value"] == {
        "version": 2,
        "memory_bytes": 8 * GIB,
        "cpus": 4.0,
    }
    assert facts["memory_available_bytes"]["value"] == 6 * GIB
    assert facts["paths"]["value"]["/dev/shm"]["size_bytes"] == 64 * 1024**2  # noqa: S108
    assert facts["paths"]["value"]["/tmp/x"]["noexec"]  # noqa: S108
    assert facts["acs_redirecting"]["unknown"] == "lspci is not installed"


def test_other_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cards(name: str) -> list[tuple[str, str, str]]:
        facts = Recorded(tmp_path, name).facts(monkeypatch)
        devices = [(one["address"], one["device_id"]) for one in facts["nvidia_devices"]["value"]]
        named = {one["address"]: one["name"] for one in facts["gpus"]["value"] or []}
        return [(address, kind, named.get(address, "")) for address, kind in devices]

    workstation = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    assert cards("workstation-1") == [("0000:01:00.0", "10de:2bb1", workstation)]
    assert [one[0] for one in cards("two-domains")] == ["0000:16:00.0", "0001:16:00.0"]
    assert [one[1] for one in cards("max-q")] == ["10de:2bb4"] * 2
    assert cards("bmc-vga") == []
    assert {one[2] for one in cards("h200-8")} == {"NVIDIA H200"}
    assert cards("shuffled") == cards("reference-8")
    facts = Recorded(tmp_path, "h200-8").facts(monkeypatch)
    assert len(facts["nvswitch_devices"]["value"]) == 4
    assert {link for row in facts["gpu_links"]["value"].values() for link in row.values()} == {
        "nvlink"
    }
    mig = Recorded(tmp_path, "mig").facts(monkeypatch)["gpus"]["value"]
    assert [(one["mig_current"], one["mig_pending"]) for one in mig] == [
        ("enabled", "enabled"),
        ("disabled", "enabled"),
    ]
    facts = Recorded(tmp_path, "workstation-1").facts(monkeypatch, paths=["/home/x"])
    (drawing,) = facts["gpu_processes"]["value"]
    assert (drawing["kind"], drawing["name"]) == ("G", "/usr/bin/gnome-shell")
    assert facts["paths"]["value"]["/home/x"]["reflink"] is True
    assert facts["nvidia_devices"]["value"][0]["numa_node"] is None


@pytest.mark.parametrize("name", boxes.names())
def test_every_recorded_box_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No stand-in was asked what the box does not answer."""
    for fact, content in (
        Recorded(tmp_path, name).facts(monkeypatch, paths=PATHS, packages=WANTED).items()
    ):
        assert "no recorded answer" not in str(content["unknown"]), fact


def test_a_box_says_what_its_stand_ins_are(tmp_path: Path) -> None:
    _, stand_ins = boxes.unpack("reference-8", tmp_path)
    for path in stand_ins.iterdir():
        assert "# stand-in for" in path.read_text()
    boxes.unpack("reference-2", tmp_path, real_behind=True)
    done = subprocess.run([stand_ins / "uname", "-s"], capture_output=True, text=True, check=True)
    assert done.stdout == "Linux\n"  # the real one
    done = subprocess.run([stand_ins / "uname", "-r"], capture_output=True, text=True, check=True)
    assert done.stdout == "6.14.0-37-generic\n"


def test_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = Box(tmp_path / "none").facts()
    assert set(facts) == NAMES
    for name, fact in facts.items():
        assert fact["value"] is None, name
        assert fact["unknown"], name


def test_bus_without_devices_is_none_and_no_bus_is_unknown(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.command("lspci", "echo 'pcilib: Cannot open /proc/bus/pci' >&2; exit 1")
    facts = recorded.facts(monkeypatch)
    assert facts["nvidia_devices"]["value"] is None
    assert "Cannot open /proc/bus/pci (exit status 1)" in facts["nvidia_devices"]["unknown"]
    pci_files(recorded.root)
    assert recorded.facts(monkeypatch)["nvidia_devices"]["value"] == []


def test_limits_of_cgroup_v2(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = "sys/fs/cgroup/system.slice"
    recorded.file(f"{slices}/memory.max", f"{64 * GIB}\n")
    recorded.file(f"{slices}/memory.current", f"{20 * GIB}\n")
    recorded.file(f"{slices}/memory.stat", f"anon 1\ninactive_file {4 * GIB}\n")
    recorded.file(f"{slices}/cpu.max", "850000 100000\n")
    facts = recorded.facts(monkeypatch)
    assert facts["memory_total_bytes"]["value"] == 64 * GIB
    assert facts["memory_available_bytes"]["value"] == 48 * GIB
    assert facts["cpu_count"]["value"] == 8
    assert facts["cpu_count"]["source"].endswith("system.slice")
    recorded.file("proc/self/status", "Cpus_allowed_list:\t0,2\n")
    assert recorded.facts(monkeypatch)["cpu_count"]["value"] == 2


def test_limit_of_a_container_with_the_path_of_the_host(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.file("proc/self/cgroup", "0::/machine.slice/libpod-1.scope/container\n")
    recorded.file("sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    recorded.file("sys/fs/cgroup/memory.current", f"{9 * GIB}\n")
    facts = recorded.facts(monkeypatch)
    assert facts["memory_total_bytes"]["value"] == 8 * GIB
    assert facts["memory_available_bytes"]["value"] == 0


def test_limits_of_cgroup_v1(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.file("proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/x\n")
    group = "sys/fs/cgroup/memory/box"
    recorded.file(f"{group}/memory.limit_in_bytes", f"{16 * GIB}\n")
    recorded.file(f"{group}/memory.usage_in_bytes", f"{6 * GIB}\n")
    recorded.file(f"{group}/memory.stat", f"total_inactive_file {GIB}\n")
    recorded.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    recorded.file("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "400000\n")
    recorded.file("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n")
    facts = recorded.facts(monkeypatch)
    assert facts["memory_total_bytes"]["value"] == 16 * GIB
    assert facts["memory_available_bytes"]["value"] == 11 * GIB
    assert facts["cpu_count"]["value"] == 4
    recorded.file("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "-1\n")
    recorded.file(f"{group}/memory.limit_in_bytes", "9223372036854771712\n")
    facts = recorded.facts(monkeypatch)
    assert facts["cpu_count"]["value"] == 64
    assert facts["memory_total_bytes"]["value"] == 288 * GIB


def test_tool_that_hangs(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "COMMAND_SECONDS", 0.2)
    recorded.command("nvidia-smi", f"exec {shutil.which('sleep')} 600")
    begin = time.monotonic()
    facts = recorded.facts(monkeypatch)
    assert time.monotonic() - begin < AT_ONCE
    assert "did not answer within" in facts["gpus"]["unknown"]


def test_tool_that_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lspci").write_bytes(b"\x7fELF rubbish")
    (tmp_path / "lspci").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cannot be run" in str(run_command(["lspci"]).fault)


def test_locale_does_not_change_the_words(recorded: Recorded) -> None:
    recorded.command("tool", 'echo "$LC_ALL"')
    assert run_command([str(recorded.bin / "tool")]).stdout == "C\n"


# --- the module -----------------------------------------------------------------------------------


def test_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded(tmp_path, "reference-8")
    monkeypatch.setenv("PATH", str(recorded.bin))
    results = []
    for check in (False, True):
        arguments = {"root": str(recorded.root), "paths": PATHS, "_ansible_check_mode": check}
        results.append(modules.run("hardware_facts", arguments, capsys))
    assert results[0] == results[1]
    assert not results[0]["changed"]
    assert len(results[0]["hardware"]["gpus"]["value"]) == 8


def test_facts_of_this_machine() -> None:
    facts = Box(Path("/")).facts()
    assert 0 < facts["cpu_count"]["value"] <= len(os.sched_getaffinity(0))
    assert facts["kernel_running"]["value"] == os.uname().release
    assert 0 < facts["memory_available_bytes"]["value"] <= facts["memory_total_bytes"]["value"]


def test_module_through_ansible(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, "reference-2")
    environment = {
        **os.environ,
        "PATH": f"{recorded.bin}:{os.environ['PATH']}",
        "ANSIBLE_LIBRARY": str(ROOT / "plugins/modules"),
        "ANSIBLE_MODULE_UTILS": str(ROOT / "plugins/module_utils"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
    }
    command = [str(Path(sys.executable).with_name("ansible")), "localhost", "-c", "local"]
    command += ["-i", "localhost,", "-m", "hardware_facts", "-o", "--check", "--diff"]
    command += ["-e", f"ansible_python_interpreter={sys.executable}"]
    command += ["-a", json.dumps({"root": str(recorded.root)})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    hardware_facts = json.loads(done.stdout.partition("=> ")[2])["hardware"]
    assert [card["address"] for card in hardware_facts["gpus"]["value"]] == [
        "0000:16:00.0",
        "0000:27:00.0",
    ]
    assert hardware_facts["kernel_running"]["value"] == "6.14.0-37-generic"


def test_the_time_to_read_nvidia_smi_does_not_grow_with_the_square_of_its_depth() -> None:
    deep = "<gpu>" * 30_000 + "</gpu>" * 30_000
    start = time.monotonic()
    assert parse_smi_xml(f"<nvidia_smi_log>{deep}</nvidia_smi_log>") == (None, [])
    assert time.monotonic() - start < 2
