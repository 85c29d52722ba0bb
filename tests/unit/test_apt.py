# SPDX-License-Identifier: Apache-2.0
"""apt's own words, and what they mean for the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpubox import apt
from gpubox.apt import (
    families,
    is_driver,
    kept,
    parse_holds,
    parse_preferences,
    parse_simulation,
    parse_unattended,
)
from gpubox.preflight_packages import check_packages
from gpubox.probe import Output
from hypothesis import given
from hypothesis import strategies as st

from tests import boxes

CONFIG = boxes.read("reference-8").commands["apt-config"]["dump"][1]
PREFERENCES = boxes.read("reference-8").files["etc/apt/preferences.d/nvidia-driver"]
REPOSITORY = ["libnvidia-compute", "nvidia-dkms-open", "nvidia-open"]
UBUNTU = ["libnvidia-common-580-server", "libnvidia-compute-580-server", "nvidia-driver-580-server"]
PIN = {"packages": ["nvidia-*", "libnvidia-*"], "pin": "version 590.48.01*", "priority": 1001}
# a monitoring tool that wants another library of the driver
BREAKS = """\
Reading package lists...
The following packages will be REMOVED:
  libnvidia-compute nvidia-open
Remv nvidia-open [590.48.01-1ubuntu1]
Remv libnvidia-compute:amd64 [590.48.01-1ubuntu1] []
Purg nvidia-dkms-open [590.48.01-1ubuntu1]
Inst libc6 [2.39-0ubuntu8.4] (2.39-0ubuntu8.5 Ubuntu:24.04/noble-updates [amd64]) [libc6-dev:amd64 ]
Inst libnvidia-compute-535 (535.274.02-0ubuntu0.24.04.2 Ubuntu:24.04/noble-updates [amd64])
Inst nvtop (3.0.2-1 Ubuntu:24.04/noble [amd64])
Conf nvtop (3.0.2-1 Ubuntu:24.04/noble [amd64])
"""


def facts(**values: Any) -> dict[str, dict[str, Any]]:
    base: dict[str, Any] = {
        "driver_packages": [{"package": name, "version": "590.48.01-1"} for name in REPOSITORY],
        "apt_holds": [],
        "apt_pins": [],
        "unattended_upgrades": {"enabled": False, "spared": []},
        "packages_missing": [],
        "apt_simulation": [],
        **values,
    }
    return {name: {"value": value, "unknown": None, "source": "x"} for name, value in base.items()}


def packages(names: list[str]) -> list[dict[str, str]]:
    return [{"package": name, "version": "580.95.05-0ubuntu0.24.04.2"} for name in names]


def test_holds() -> None:
    assert parse_holds("nvidia-driver-580-open\nlibc6:i386\n\nE: no\n") == [
        "libc6",
        "nvidia-driver-580-open",
    ]


def test_preferences() -> None:
    (pin,) = parse_preferences(PREFERENCES)
    assert pin["packages"] == ["nvidia-*", "libnvidia-*", "linux-modules-nvidia-*", "cuda-drivers*"]
    assert (pin["pin"], pin["priority"]) == ("version 590.48.01*", 1001)
    folded = "Package: a\n b\nPin: release o=X\nPin-Priority: -1\n\nPackage: c\nPin: version 1\n"
    assert parse_preferences(folded) == [
        {"packages": ["a", "b"], "pin": "release o=X", "priority": -1}
    ]


def test_unattended() -> None:
    assert parse_unattended(CONFIG) == (True, [])
    assert parse_unattended(CONFIG.replace('Upgrade "1"', 'Upgrade "0"')) == (False, [])
    spared = 'Unattended-Upgrade::Package-Blacklist:: "nvidia-";\n'
    assert parse_unattended(spared) == (False, ["nvidia-"])


def test_simulation() -> None:
    found = [(one["action"], one["package"], one["old"]) for one in parse_simulation(BREAKS)]
    assert found == [
        ("remove", "nvidia-open", "590.48.01-1ubuntu1"),
        ("remove", "libnvidia-compute", "590.48.01-1ubuntu1"),
        ("remove", "nvidia-dkms-open", "590.48.01-1ubuntu1"),
        ("change", "libc6", "2.39-0ubuntu8.4"),
        ("install", "libnvidia-compute-535", None),
        ("install", "nvtop", None),
    ]
    assert parse_simulation(BREAKS)[3]["new"] == "2.39-0ubuntu8.5"


def test_what_is_a_driver_and_of_which_family() -> None:
    assert all(is_driver(name) for name in [*REPOSITORY, *UBUNTU, "libnvidia-ml1:amd64"])
    other = ["libnvidia-container1", "nvidia-container-toolkit", "nvidia-settings", "nvtop"]
    other += ["libnvidia-egl-wayland1", "cuda-toolkit-13-0", "nvidia-cuda-toolkit"]
    assert not any(is_driver(name) for name in other)
    assert families([*UBUNTU, "nvidia-settings"]) == (UBUNTU, [])
    assert families(REPOSITORY) == ([], ["libnvidia-compute", "nvidia-dkms-open"])
    # NVIDIA's repository before branch 590: metapackages without number over packages with one
    assert families(["cuda-drivers", "nvidia-open", "nvidia-driver-580"])[1] == []


def test_what_is_kept() -> None:
    assert kept(REPOSITORY, ["nvidia-open"], []) == {"nvidia-open"}
    assert kept(REPOSITORY, [], [PIN]) == set(REPOSITORY)
    assert kept(REPOSITORY, [], [{**PIN, "priority": 100}]) == set()
    assert kept(REPOSITORY, [], [{**PIN, "pin": "origin example.org", "priority": 600}]) == set()
    regular = {**PIN, "packages": ["/^libnvidia/", "/(/"]}
    assert kept(REPOSITORY, [], [regular], ["nvidia-o"]) == {"libnvidia-compute", "nvidia-open"}


@pytest.mark.parametrize(
    ("changed", "measured"),
    [
        ({}, None),
        ({"apt_holds": REPOSITORY}, None),
        ({"apt_pins": [PIN]}, None),
        ({"apt_holds": None}, None),
        (
            {"apt_holds": ["nvidia-open"]},
            "libnvidia-compute, nvidia-dkms-open may be upgraded, and nvidia-open may not",
        ),
        (
            {"unattended_upgrades": {"enabled": True, "spared": ["nvidia-"]}},
            "libnvidia-compute may be upgraded; unattended upgrades are on",
        ),
        ({"unattended_upgrades": {"enabled": True, "spared": ["nvidia-", "libnvidia-"]}}, None),
        ({"unattended_upgrades": {"enabled": True, "spared": []}, "driver_packages": []}, None),
        ({"unattended_upgrades": {"enabled": True, "spared": []}, "apt_pins": [PIN]}, None),
    ],
)
def test_a_driver_is_kept_whole_or_not_at_all(
    changed: dict[str, Any], measured: str | None
) -> None:
    found = check_packages(facts(**changed))
    assert [(one.severity, one.measured) for one in found] == (
        [("warning", measured)] if measured else []
    )
    if found:
        assert "`Pin: version 590.48.01*`" in found[0].remedy


def test_two_families_side_by_side() -> None:
    assert check_packages(facts(driver_packages=packages(UBUNTU))) == []
    (finding,) = check_packages(facts(driver_packages=packages([*UBUNTU, "libnvidia-compute"])))
    assert finding.severity == "warning"
    assert finding.measured == (
        "driver packages of two families: libnvidia-common-580-server, "
        "libnvidia-compute-580-server, nvidia-driver-580-server, and libnvidia-compute"
    )


def test_what_is_installed_must_leave_the_driver_alone() -> None:
    (finding,) = check_packages(
        facts(packages_missing=["nvtop"], apt_simulation=parse_simulation(BREAKS))
    )
    assert finding.severity == "error"
    assert finding.measured == (
        "to install nvtop, apt would remove nvidia-open, remove libnvidia-compute, remove "
        "nvidia-dkms-open, install libnvidia-compute-535"
    )
    assert "--no-install-recommends nvtop`" in finding.remedy
    harmless = boxes.read("reference-8").commands["apt-get"]
    (text,) = [text for _, text in harmless.values()]
    simulated = parse_simulation(text)
    assert [one["package"] for one in simulated][-1] == "python3-venv"
    assert check_packages(facts(apt_simulation=simulated)) == []
    assert check_packages(facts(apt_simulation=None)) == []


def test_apt_is_asked_only_for_what_is_missing() -> None:
    asked: list[str] = []

    def run(command: Any) -> Output:
        asked.append(" ".join(command))
        if command[0] == "dpkg-query":
            return Output("gcc\tinstalled\nnvtop\tconfig-files\n", "no packages found", 1)
        return Output("", "E: Unable to locate package nvtop", 100)

    found = apt.installing(run, ["gcc", "nvtop=3.0.2-1"])
    assert found["packages_missing"].value == ["nvtop=3.0.2-1"]
    assert found["apt_simulation"].unknown == (
        "E: Unable to locate package nvtop (exit status 100)"
    )
    assert asked[-1] == "apt-get -s install --no-install-recommends nvtop=3.0.2-1"
    asked.clear()
    assert apt.installing(run, ["gcc"])["apt_simulation"].value == []
    assert len(asked) == 1


def test_files_that_apt_does_not_take_pin_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "etc/apt/preferences.d"
    folder.mkdir(parents=True)

    def run(_: Any) -> Output:
        return Output(CONFIG)

    for name, pins in (("nvidia.save", 0), ("nvidia", 1), ("nvidia.pref", 2)):
        (folder / name).write_text(PREFERENCES)
        assert len(apt.keeping(tmp_path, run)["apt_pins"].value) == pins
    # switched on, and not installed
    assert apt.keeping(tmp_path, run)["unattended_upgrades"].value["enabled"] is False
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/unattended-upgrade").write_text("")
    assert apt.keeping(tmp_path, run)["unattended_upgrades"].value["enabled"] is True


NAMES = st.lists(st.text(max_size=12) | st.sampled_from([*REPOSITORY, *UBUNTU]), max_size=5)


@given(NAMES, NAMES, st.lists(st.text(max_size=12), max_size=3), st.integers(-2, 1001))
def test_what_is_kept_is_of_what_there_is(
    names: list[str], holds: list[str], patterns: list[str], priority: int
) -> None:
    pins = [{"packages": patterns, "pin": "version 5*", "priority": priority}]
    found = kept(names, holds, pins, patterns)
    assert found <= set(names)
    assert set(names) & {name for name in holds if ":" not in name} <= found
    assert not set(families(names)[0]) & set(families(names)[1])
