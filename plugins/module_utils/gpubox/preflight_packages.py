# SPDX-License-Identifier: Apache-2.0
"""What apt will do to the driver, by itself or for the site: findings from hardware facts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .apt import families, is_driver, kept
from .preflight import Finding

Facts = Mapping[str, Mapping[str, Any]]
_PREFERENCES = "/etc/apt/preferences.d/nvidia-driver"
_PATTERNS = "nvidia-* libnvidia-* linux-modules-nvidia-* cuda-drivers*"


def _value(facts: Facts, name: str) -> Any:
    return facts.get(name, {}).get("value")


def _some(names: Iterable[str]) -> str:
    """The first three names and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more


def check_packages(facts: Facts) -> list[Finding]:
    """The driver's packages stay as they are, and are of one family."""
    packages = {one["package"]: one["version"] for one in _value(facts, "driver_packages") or []}
    installed = [name for name in packages if is_driver(name)]
    return [
        *_kept_findings(facts, installed, packages),
        *_family_findings(installed),
        *_simulation_findings(facts),
    ]


def _kept_findings(
    facts: Facts, installed: Collection[str], versions: Mapping[str, str]
) -> list[Finding]:
    """Siblings that an upgrade takes away from a driver that is kept (field reports D1 and D2)."""
    holds, pins = _value(facts, "apt_holds"), _value(facts, "apt_pins")
    unattended = _value(facts, "unattended_upgrades") or {"enabled": False, "spared": []}
    if holds is None or pins is None or not installed:
        return []
    still = kept(installed, holds, pins)
    spared = kept(installed, holds, pins, unattended["spared"])
    by_itself = unattended["enabled"] and len(spared) < len(installed)
    if not by_itself and (not still or len(still) == len(installed)):
        return []  # all or none is kept, and nothing comes by itself
    free = set(installed) - (spared if by_itself else still)
    measured = f"{_some(free)} may be upgraded"
    if still:
        measured += f", and {_some(still)} may not"
    if by_itself:
        measured += "; unattended upgrades are on"
    version = min(versions[name] for name in free).rpartition(":")[2].partition("-")[0]
    return [
        Finding(
            "warning",  # it works until the next upgrade
            "packages",
            measured,
            "the whole family of the driver kept at one version, or upgraded by hand as a whole",
            f"write `Package: {_PATTERNS}`, `Pin: version {version}*` and `Pin-Priority: 1001` "
            f"into {_PREFERENCES}; `apt-get -s upgrade` must not name an NVIDIA package then",
        )
    ]


def _family_findings(installed: Collection[str]) -> list[Finding]:
    """Packages of Ubuntu's archive and of NVIDIA's repository side by side (field report D7)."""
    numbered, plain = families(installed)
    if not numbered or not plain:
        return []
    return [
        Finding(
            # whether it works now is judged by what is loaded; the next upgrade meets conflicts
            "warning",
            "packages",
            f"driver packages of two families: {_some(numbered)}, and {_some(plain)}",
            "one family: Ubuntu's, which carry the branch in their names, or those of NVIDIA's "
            "repository",
            "see which repository each comes from (apt-cache policy NAME), and purge those of the "
            "other one",
        )
    ]


def _simulation_findings(facts: Facts) -> list[Finding]:
    """What the site installs leaves the driver alone (field reports D13 and C4)."""
    touched = [one for one in _value(facts, "apt_simulation") or [] if is_driver(one["package"])]
    if not touched:
        return []
    words = [
        f"{one['action']} {one['package']}"
        + (f" ({one['old']} to {one['new']})" if one["action"] == "change" else "")
        for one in touched
    ]
    missing = _value(facts, "packages_missing") or []
    return [
        Finding(
            "error",
            "packages",
            f"to install {', '.join(missing)}, apt would {', '.join(words[:5])}"
            + (f" and {len(words) - 5} more" if len(words) > 5 else ""),
            "packages that leave the NVIDIA driver as it is",
            "look with `apt-get -s install --no-install-recommends "
            f"{' '.join(missing)}`; take the package out of python_env_extra_packages, or pin the "
            f"driver in {_PREFERENCES}",
        )
    ]
