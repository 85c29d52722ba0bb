# SPDX-License-Identifier: Apache-2.0
"""Each state of cards and driver in which people lost days, and the box where all is well."""

from __future__ import annotations

from typing import Any

import pytest
from gpubox.preflight import Finding
from gpubox.preflight_cards import (
    check_cards,
    check_cuda_link,
    check_driver,
    check_links,
    check_toolkits,
)
from hypothesis import given
from hypothesis import strategies as st

KERNEL = "6.14.0-37-generic"
ADDRESSES = [f"0000:{bus}:00.0" for bus in ("16", "27", "38", "5a", "98", "ac", "c8", "d8")]


def card(address: str, **changed: Any) -> dict[str, Any]:
    return {
        "index": ADDRESSES.index(address),
        "address": address,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "memory_total_mib": 97887,
        "mig_current": "disabled",
        "mig_pending": "disabled",
        "ecc_current": "enabled",
        "ecc_pending": "enabled",
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_generation": 1,  # idle
        "pcie_generation_max": 5,
        **changed,
    }


def device(address: str, revision: str = "a1", device_id: str = "10de:2bb5") -> dict[str, Any]:
    return {"address": address, "class": "0302", "device_id": device_id, "revision": revision}


def box(**changed: Any) -> dict[str, dict[str, Any]]:
    """Facts of the reference box; a value that is an exception's text is given as ``unknown_…``."""
    values: dict[str, Any] = {
        "nvidia_devices": [device(address) for address in ADDRESSES],
        "gpus": [card(address) for address in ADDRESSES],
        "nvidia_smi_messages": [],
        "gpu_processes": [],
        "driver_loaded": "590.48.01",
        "driver_flavour": "open",
        "driver_installed": "590.48.01",
        "driver_packages": [{"package": "nvidia-open", "version": "590.48.01-1ubuntu1"}],
        "kernel_running": KERNEL,
        "kernel_boot": KERNEL,
        "dkms": [
            {"module": "nvidia", "version": "590.48.01", "kernel": KERNEL, "state": "installed"}
        ],
        "module_installed": {"version": "590.48.01", "flavour": "open", "signer": "box key"},
        "secure_boot": False,
        **changed,
    }
    return {
        name: {"value": value, "unknown": "not told" if value is None else None, "source": "x"}
        for name, value in values.items()
    }


def said(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.measured) for finding in findings]


def test_the_reference_box_passes() -> None:
    assert check_cards(box()) == []
    assert check_driver(box()) == []


def without_driver(**changed: Any) -> dict[str, dict[str, Any]]:
    names = ("gpus", "driver_loaded", "driver_flavour", "driver_installed", "module_installed")
    return box(**{**dict.fromkeys(names), "driver_packages": [], "dkms": [], **changed})


def test_a_box_without_cards_needs_no_driver() -> None:
    assert check_driver(box(nvidia_devices=[]), "590.48.01") == []
    assert check_driver(without_driver()) == []
    assert check_cards(without_driver()) == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (box(), []),
        (without_driver(), ["no NVIDIA driver is loaded (not told)"]),
        (
            without_driver(driver_loaded="580.95.05", driver_installed="580.95.05", gpus=[]),
            ["driver 580.95.05 is loaded"],
        ),
        (without_driver(driver_installed="580.95.05"), ["driver 580.95.05 is installed"]),
        (
            without_driver(driver_installed="590.48.01"),
            ["driver 590.48.01 is installed and not loaded"],
        ),
        # installed by NVIDIA's own installer: no package knows it
        (
            without_driver(module_installed={"version": "580.1.2", "flavour": "open"}),
            ["driver 580.1.2 is installed"],
        ),
        # after the reboot that the first finding asks for, all is well; or it is not
        (
            box(driver_loaded="590.44.01"),
            ["kernel module 590.44.01 is loaded, libraries 590.48.01 are installed"],
        ),
        (
            box(driver_installed="595.10.01"),
            [
                "kernel module 590.48.01 is loaded, libraries 595.10.01 are installed",
                "driver 595.10.01 is installed",
            ],
        ),
        # why it is not loaded is told already
        (
            box(driver_loaded=None, gpus=None, kernel_running="6.14.0-38-generic"),
            [f"kernel 6.14.0-38-generic runs; there are NVIDIA modules for {KERNEL} only"],
        ),
    ],
)
def test_another_driver_than_the_pinned_one(
    facts: dict[str, dict[str, Any]], expected: list[str]
) -> None:
    found = check_driver(facts, "590.48.01")
    assert said(found) == [("error", text) for text in expected]
    assert check_driver(facts) == [one for one in found if not one.wanted.startswith("driver 590")]
    for one in found:
        if one.measured == "driver 580.95.05 is loaded":
            assert one.wanted == "driver 590.48.01 is loaded"
            assert "or set nvidia_driver_version: 580.95.05" in one.remedy


def test_the_order_of_cards_changes_nothing() -> None:
    facts = box(gpus=[card(address) for address in ADDRESSES[::-1]])
    assert check_cards(facts) == []


@pytest.mark.parametrize(
    ("changed", "severity", "words"),
    [
        ({"mig_current": "enabled", "mig_pending": "enabled"}, "error", "has MIG enabled"),
        ({"mig_pending": "enabled"}, "warning", "MIG is disabled and enabled after a reset"),
        ({"ecc_pending": "disabled"}, "warning", "ECC is enabled and disabled after a reset"),
        ({"pcie_width": 8}, "warning", "runs 8 of 16 PCIe lanes"),
    ],
)
def test_the_state_of_one_card(changed: dict[str, Any], severity: str, words: str) -> None:
    cards = [card(address) for address in ADDRESSES[:7]] + [card(ADDRESSES[7], **changed)]
    (finding,) = check_cards(box(gpus=cards))
    assert finding.severity == severity
    assert words in finding.measured
    assert "0000:d8:00.0" in finding.measured


def test_what_a_card_does_not_tell_is_no_fault() -> None:
    nothing = dict.fromkeys(
        ("mig_current", "mig_pending", "ecc_current", "ecc_pending", "pcie_width")
    )
    assert check_cards(box(gpus=[card(a, **nothing) for a in ADDRESSES])) == []


def test_a_process_on_a_card_is_named_unless_it_is_ours() -> None:
    process = {"address": ADDRESSES[0], "pid": 4711, "name": "python3", "memory_used_mib": 9000}
    (finding,) = check_cards(box(gpu_processes=[process]))
    assert finding.measured == "PID 4711 (python3) holds 9000 MiB of card 0000:16:00.0"
    assert check_cards(box(gpu_processes=[process]), {4711}) == []
    unnamed = {**process, "name": None, "memory_used_mib": None}
    (finding,) = check_cards(box(gpu_processes=[unnamed]))
    assert "holds memory of" in finding.measured
    assert finding.severity == "error"
    (finding,) = check_cards(box(gpu_processes=[{**process, "kind": "G"}]))
    assert finding.severity == "warning"


def test_memory_that_no_process_is_told_to_hold() -> None:
    gpus = [card(address, memory_used_mib=4) for address in ADDRESSES]
    assert check_cards(box(gpus=gpus)) == []
    gpus[1]["memory_used_mib"] = 9000
    for processes in ([], None):
        (finding,) = check_cards(box(gpus=gpus, gpu_processes=processes))
        assert (finding.severity, finding.check) == ("warning", "memory")
        assert finding.measured.startswith("card 0000:27:00.0: 9000 MiB are in use, by no process")
    assert check_cards(box(gpus=gpus), {4711}) == []  # our own server, seen from a container


def test_the_fabric_manager_goes_with_nvswitches() -> None:
    manager = {"package": "nvidia-fabricmanager-590", "version": "590.48.01-1"}
    packages = box()["driver_packages"]["value"]
    both = [*packages, manager]
    switches = [{"address": "0000:05:00.0"}]
    assert check_driver(box(nvswitch_devices=[])) == []
    assert check_driver(box(nvswitch_devices=switches, driver_packages=both)) == []
    assert check_driver(box(nvswitch_devices=None, driver_packages=both)) == []
    (finding,) = check_driver(box(nvswitch_devices=[], driver_packages=both))
    assert finding.severity == "warning"
    assert finding.remedy == "apt purge nvidia-fabricmanager-590"
    (finding,) = check_driver(box(nvswitch_devices=switches))
    assert finding.measured == "1 NVSwitches, and no package of the fabric manager"


def test_another_driver_that_holds_the_cards() -> None:
    (finding,) = check_driver(without_driver(other_drivers=["nouveau"]))
    assert finding.measured == "nouveau is loaded and holds the cards"
    both = check_driver(without_driver(other_drivers=["nouveau"]), "590.48.01")
    assert [one.measured for one in both][1:] == ["no NVIDIA driver is loaded (not told)"]
    assert check_driver(box(other_drivers=["nouveau"]), "590.48.01") == []


@pytest.mark.parametrize(
    ("changed", "severity", "words"),
    [
        ({"driver_loaded": "590.44.01", "gpus": None}, "error", "590.44.01 is loaded"),
        ({"gpus": None}, "error", "nvidia-smi fails: not told"),
        ({"driver_flavour": "proprietary"}, "error", "proprietary kernel modules"),
        (
            {"module_installed": {"version": "1.1", "flavour": "proprietary", "signer": "x"}},
            "error",
            "proprietary kernel modules",
        ),
        (
            {"kernel_running": "6.14.0-38-generic", "driver_loaded": None, "gpus": None},
            "error",
            "kernel 6.14.0-38-generic runs",
        ),
        ({"kernel_boot": "6.14.0-38-generic"}, "warning", "6.14.0-38-generic boots next"),
        (
            {
                "secure_boot": True,
                "module_installed": {"version": "590.48.01", "flavour": "open", "signer": ""},
            },
            "error",
            "is not signed",
        ),
    ],
)
def test_the_driver(changed: dict[str, Any], severity: str, words: str) -> None:
    (finding,) = check_driver(box(**changed))
    assert finding.severity == severity
    assert words in finding.measured


def test_an_older_card_works_with_proprietary_modules() -> None:
    hopper = [device(address, device_id="10de:2335") for address in ADDRESSES]
    assert check_driver(box(nvidia_devices=hopper, driver_flavour="proprietary")) == []


def test_one_missing_module_is_told_once() -> None:
    newest = "6.14.0-38-generic"
    found = check_driver(box(kernel_running=newest, kernel_boot=newest, driver_loaded=None))
    assert [finding.severity for finding in found] == ["error"]


def test_a_module_that_is_loaded_counts_however_it_was_installed() -> None:
    newest = "6.14.0-38-generic"
    assert check_driver(box(kernel_running=newest, kernel_boot=newest)) == []


def test_other_modules_of_nvidia_are_no_driver() -> None:
    newest = "6.14.0-38-generic"
    other = {"module": "nvidia-fs", "version": "2.26.6", "kernel": newest, "state": "installed"}
    driver = {"module": "nvidia", "version": "590.48.01", "kernel": KERNEL, "state": "installed"}
    (finding,) = check_driver(
        box(dkms=[driver, other], kernel_running=newest, kernel_boot=newest, driver_loaded=None)
    )
    assert f"modules for {KERNEL} only" in finding.measured


def test_a_driver_that_no_kernel_has_is_named() -> None:
    added = {"module": "nvidia", "version": "590.48.01", "kernel": "", "state": "added"}
    for packages in ([], box()["driver_packages"]["value"]):
        facts = box(dkms=[added], driver_loaded=None, gpus=None, driver_packages=packages)
        (finding,) = check_driver(facts)
        assert finding.measured == "DKMS has nvidia/590.48.01, and no kernel has it installed"
        assert f"linux-headers-{KERNEL}" in finding.remedy
    built = added | {"kernel": KERNEL, "state": "built"}
    (finding,) = check_driver(box(dkms=[added, built], driver_loaded=None, gpus=None))
    assert finding.measured.startswith("DKMS has nvidia/590.48.01,")
    assert check_driver(box(dkms=[added])) == []  # another one is loaded
    zfs = added | {"module": "zfs"}
    assert check_driver(box(dkms=[zfs], driver_loaded=None, driver_packages=[])) == []


TOOLKITS = [
    {"toolkit": "12.8", "version": "12.8.1", "compiler": True},
    {"toolkit": "13.0", "version": "13.0.2", "compiler": True},
    {"toolkit": "13.1", "version": "13.1.0", "compiler": False},
]


def test_toolkits() -> None:
    facts = box(cuda_toolkits=TOOLKITS)
    assert check_toolkits(facts, ["13.0"], "13.0") == []
    assert check_toolkits(facts, [], None) == []
    (missing,) = check_toolkits(facts, ["13.1", "13.0"], "13.0")
    assert missing.measured == "no nvcc of CUDA 13.1 below /usr/local; there is 12.8, 13.0"
    assert "cuda-toolkit-13-1 (never" in missing.remedy
    (other,) = check_toolkits(facts, ["12.8"], "13.0")
    assert other.measured == "torch is built for CUDA 13.0, the toolkits are 12.8"
    (finding,) = check_toolkits(box(cuda_toolkits=None), ["13.0"], "13.0")
    assert finding.measured == "no nvcc of CUDA 13.0 below /usr/local; not told"


@pytest.mark.parametrize(
    ("link", "measured", "remedy"),
    [
        (("alternative", "/usr/local/cuda-13.0", True), None, ""),
        (("link", "/usr/local/cuda-13.1", False), None, ""),
        (("none", None, False), None, ""),
        (("directory", "/usr/local/cuda", False), None, ""),
        (
            ("alternative", "/usr/local/cuda-12.8", True),
            "/usr/local/cuda leads to /usr/local/cuda-12.8",
            "update-alternatives --set cuda /usr/local/cuda-13.1",
        ),
        (
            ("link", None, False),
            "/usr/local/cuda leads to nothing",
            "ln -sfn /usr/local/cuda-13.1 /usr/local/cuda",
        ),
        (
            ("link", "/usr/local/cuda-13.1", True),
            "/usr/local/cuda is a plain link to /usr/local/cuda-13.1",
            (
                "ln -sfn /etc/alternatives/cuda /usr/local/cuda, then update-alternatives --set "
                "cuda /usr/local/cuda-13.1"
            ),
        ),
    ],
)
def test_who_owns_the_link_of_cuda(
    link: tuple[str, str | None, bool], measured: str | None, remedy: str
) -> None:
    value = dict(zip(("kind", "target", "alternative"), link, strict=True))
    found = check_cuda_link(box(cuda_link=value), ["13.1", "13.0"])
    assert said(found) == ([("warning", measured)] if measured else [])
    assert [one.remedy for one in found] == ([remedy] if measured else [])
    assert check_cuda_link(box(cuda_link=value), []) == []
    assert check_cuda_link(box(), ["13.1"]) == []


def test_bridges_that_keep_cards_apart() -> None:
    bridges = ["0000:15:01.0", "0000:26:01.0"]
    (finding,) = check_links(box(iommu="on", acs_redirecting=bridges))
    assert finding.severity == "warning"
    assert "2 bridges redirect requests (ACS), the first is 0000:15:01.0" in finding.measured
    one = [device(ADDRESSES[0])]
    assert check_links(box(iommu="on", acs_redirecting=bridges, nvidia_devices=one)) == []
    for iommu, acs in (("passthrough", bridges), ("on", []), ("on", None), (None, bridges)):
        assert check_links(box(iommu=iommu, acs_redirecting=acs)) == []


@pytest.mark.parametrize(
    ("loaded", "fault"),
    [
        ("580.65.06", False),
        ("580.65", True),
        ("575.64.03", True),
        ("590.48.01", False),
        (None, False),
    ],
)
def test_cuda_13_needs_a_driver(loaded: str | None, fault: bool) -> None:
    facts = box(cuda_toolkits=TOOLKITS, driver_loaded=loaded)
    assert [finding.wanted for finding in check_toolkits(facts, ["13.0"], "13.0")] == [
        "driver 580.65.06 or newer"
    ] * fault
    assert check_toolkits(facts, ["12.8"], "12.8") == []


def test_the_cuda_that_the_driver_serves_is_no_toolkit() -> None:
    facts = box(cuda_toolkits=TOOLKITS, driver_cuda_max="12.9", driver_loaded="575.64.03")
    (finding,) = check_toolkits(facts, ["13.0"], "13.0")
    assert finding.measured == (
        "driver 575.64.03 is loaded and serves CUDA up to 12.9, torch is built for CUDA 13.0"
    )
    assert check_toolkits(facts, ["12.8"], "12.8") == []
    assert check_toolkits(box(cuda_toolkits=TOOLKITS, driver_cuda_max="13.1"), [], "13.0") == []


def test_prebuilt_modules_count() -> None:
    packages = [
        {"package": f"linux-modules-nvidia-590-server-open-{KERNEL}", "version": "6.14.0-37.37"},
        {"package": "linux-modules-nvidia-590-server-open-generic", "version": "6.14.0-37.37"},
    ]
    assert check_driver(box(dkms=None, driver_packages=packages)) == []
    newest = "6.14.0-38-generic"
    (finding,) = check_driver(
        box(dkms=[], driver_packages=packages, kernel_running=newest, driver_loaded=None)
    )
    assert f"NVIDIA modules for {KERNEL} only" in finding.measured


def test_a_signed_module_and_secure_boot_go_together() -> None:
    assert check_driver(box(secure_boot=True)) == []
    assert check_driver(box(secure_boot=None)) == []


@given(st.lists(st.sampled_from(sorted(box())), unique=True))
def test_unknown_facts_do_not_break_it(names: list[str]) -> None:
    facts = box(**dict.fromkeys(names))
    for finding in check_cards(facts) + check_driver(facts):
        assert finding.severity in ("error", "warning")
        assert finding.measured
        assert finding.wanted
        assert finding.remedy
    assert check_driver({}) == []
    assert check_cards({}) == []
