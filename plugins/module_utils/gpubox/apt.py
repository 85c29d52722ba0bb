# SPDX-License-Identifier: Apache-2.0
"""What apt keeps of the driver, and what an installation would do to it; nothing is installed.

Read are ``apt-mark showhold``, ``apt-config dump``, apt's preferences and a simulation of the
packages that the site itself installs (field reports D2, D7, D13 and C4).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .probe import Fact, Run, known, read_text, tail, unknown

# packages whose version is the driver's, in Ubuntu's archive, Debian's and NVIDIA's repository;
# the container toolkit and the graphics' loaders have versions of their own
_DRIVER = re.compile(
    r"cuda-drivers.*"
    r"|libnvidia-(?!container|egl-|api|sandboxutils).*"
    r"|linux-(?:modules|objects|signatures)-nvidia-.*"
    r"|nvidia-(?:compute-utils|dkms|driver|fabricmanager|firmware|headless|kernel|open|utils"
    r"|persistenced)(?:-.*)?"
    r"|xserver-xorg-video-nvidia.*"
)
# of those the ones that are named by the branch in one family and not in the other
_FAMILY = re.compile(
    r"(?:libnvidia-(?:compute|common|gl|decode|encode|cfg1|extra|fbc1)"
    r"|nvidia-(?:dkms|driver|kernel-common|kernel-source)|linux-modules-nvidia)"
    r"(?P<branch>-[0-9]{3})?(?:-.*)?"
)
_ACTION = re.compile(
    r"(?P<action>Inst|Remv|Purg) (?P<package>[a-z0-9][a-z0-9.+-]*)(?::[a-z0-9]+)?"
    r"(?: \[(?P<old>[^]\s]+)\])?(?: \((?P<new>\S+))?.*"
)
_ACTIONS = {"Inst": "install", "Remv": "remove", "Purg": "remove"}
_SETTING = re.compile(r'(?P<name>[A-Za-z0-9:/_.-]+) "(?P<value>.*)";')
_HOLDS_BACK = 500  # apt's priority of whatever is not the release in use


def is_driver(package: str) -> bool:
    """A package of the NVIDIA driver, with or without ``:amd64``."""
    return _DRIVER.fullmatch(package.partition(":")[0]) is not None


def families(packages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Packages that carry a branch in their name (Ubuntu's archive), and those that carry none."""
    numbered: set[str] = set()
    plain: set[str] = set()
    for package in packages:
        match = _FAMILY.fullmatch(package.partition(":")[0])
        if match:
            (numbered if match["branch"] else plain).add(package)
    return sorted(numbered), sorted(plain)


# --- parsers --------------------------------------------------------------------------------------


def parse_holds(text: str) -> list[str]:
    """Names of ``apt-mark showhold``, without their architecture."""
    names = (line.strip().partition(":")[0] for line in text.splitlines())
    return sorted({name for name in names if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name)})


def parse_preferences(text: str) -> list[dict[str, Any]]:
    """Stanzas of apt's preferences: ``packages`` (patterns), ``pin`` and ``priority``."""
    found = []
    for stanza in re.split(r"\n[ \t]*\n", "\n".join(text.splitlines())):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.split("\n"):
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and last:
                fields[last] += f" {line.strip()}"
                continue
            name, separator, value = line.partition(":")
            if separator:
                last = name.strip().lower()
                fields[last] = value.strip()
        priority = re.fullmatch(r"-?[0-9]{1,9}", fields.get("pin-priority", ""))
        if priority and fields.get("package") and fields.get("pin"):
            found.append(
                {
                    "packages": fields["package"].split(),
                    "pin": fields["pin"],
                    "priority": int(priority[0]),
                }
            )
    return found


def parse_unattended(text: str) -> tuple[bool, list[str]]:
    """``apt-config dump``: whether unattended upgrades are switched on, and what they leave out."""
    enabled, spared = False, []
    for line in text.splitlines():
        match = _SETTING.fullmatch(line.strip())
        if match is None:
            continue
        if match["name"] == "APT::Periodic::Unattended-Upgrade":
            enabled = match["value"] not in ("", "0")  # days, also as 1d
        elif match["name"] == "Unattended-Upgrade::Package-Blacklist::" and match["value"]:
            spared.append(match["value"])
    return enabled, spared


def parse_simulation(text: str) -> list[dict[str, Any]]:
    """``apt-get -s install``: action (install, change or remove), package, old and new version."""
    found = []
    for line in text.splitlines():
        match = _ACTION.fullmatch(line.strip())
        if match:
            action = _ACTIONS[match["action"]]
            if action == "install" and match["old"]:
                action = "change"
            found.append(
                {
                    "action": action,
                    "package": match["package"],
                    "old": match["old"],
                    "new": match["new"],
                }
            )
    return found


def _matches(package: str, pattern: str) -> bool:
    """A pattern of the preferences: a name, a glob, or a regular expression between slashes."""
    if len(pattern) > 1 and pattern.startswith("/") and pattern.endswith("/"):
        return _search(pattern[1:-1], package)
    return fnmatch.fnmatchcase(package, pattern)


def _search(expression: str, text: str) -> bool:
    try:
        return re.search(expression, text) is not None
    except (re.error, OverflowError, RecursionError):
        return False


def kept(
    packages: Iterable[str],
    holds: Collection[str],
    pins: Sequence[Mapping[str, Any]],
    spared: Iterable[str] = (),
) -> set[str]:
    """Packages that an upgrade leaves at their version.

    Args:
        packages: installed ones.
        holds: names on hold.
        pins: of the preferences; a version above apt's own priority, or a negative one.
        spared: regular expressions of what unattended upgrades leave out.
    """
    holding = [
        pin
        for pin in pins
        if pin["priority"] < 0
        or (pin["priority"] > _HOLDS_BACK and str(pin["pin"]).startswith("version"))
    ]
    spared = list(spared)
    found = set()
    for package in packages:
        name = package.partition(":")[0]
        if (
            name in holds
            or any(_matches(name, one) for pin in holding for one in pin["packages"])
            or any(_search(f"^(?:{one})", name) for one in spared)
        ):
            found.add(package)
    return found


# --- probes ---------------------------------------------------------------------------------------


def keeping(root: Path, run: Run) -> dict[str, Fact]:
    """Holds, pins and unattended upgrades."""
    source = "apt-mark showhold"
    output = run(["apt-mark", "showhold"])
    holds = (
        unknown(tail(output), source)
        if output.fault or output.code
        else known(parse_holds(output.stdout), source)
    )
    facts = {"apt_holds": holds, "apt_pins": _pins(root)}
    source = "apt-config dump"
    output = run(["apt-config", "dump"])
    if output.fault or output.code or not output.stdout.strip():
        facts["unattended_upgrades"] = unknown(tail(output), source)
    else:
        enabled, spared = parse_unattended(output.stdout)
        there = (root / "usr/bin/unattended-upgrade").exists()
        value = {"enabled": enabled and there, "spared": spared}
        facts["unattended_upgrades"] = known(value, source)
    return facts


def _pins(root: Path) -> Fact:
    """Pins of ``/etc/apt/preferences`` and of the files beside it that apt takes."""
    base = root / "etc/apt"
    directory = base / "preferences.d"
    try:
        if not base.is_dir():
            return unknown(f"{base} is no directory", str(base))
        names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    except OSError as error:
        return unknown(f"{directory}: {error.strerror or error}", str(directory))
    files = [base / "preferences"]
    # apt.conf(5): names of these characters, with the ending pref or none
    files += [
        directory / name for name in sorted(names) if re.fullmatch(r"[\w-]+(\.pref)?", name, re.A)
    ]
    return known(
        [pin for path in files for pin in parse_preferences(read_text(path)[0] or "")], str(base)
    )


def installing(run: Run, wanted: Sequence[str]) -> dict[str, Fact]:
    """Packages that are wanted and missing, and what apt would do to install them.

    Args:
        wanted: names, also as ``name=version``.
    """
    names = ("packages_missing", "apt_simulation")
    if not wanted:
        return dict.fromkeys(names, unknown("no package is asked for", "apt-get -s install"))
    source = "dpkg-query --show"
    plain = [one.partition("=")[0] for one in wanted]
    output = run(
        ["dpkg-query", "--show", "--showformat=${Package}\\t${db:Status-Status}\\n", *plain]
    )
    if output.fault or output.code > 1:
        return dict.fromkeys(names, unknown(tail(output), source))
    there = {
        line.partition("\t")[0]
        for line in output.stdout.splitlines()
        if line.partition("\t")[2].strip() == "installed"
    }
    missing = [one for one in wanted if one.partition("=")[0] not in there]
    facts = {"packages_missing": known(missing, source)}
    source = "apt-get -s install"
    if not missing:
        return facts | {"apt_simulation": known([], source)}
    # locks and lists stay untouched; without lists no package is found, which tells nothing
    output = run(["apt-get", "-s", "install", "--no-install-recommends", *missing])
    if output.fault or output.code:
        return facts | {"apt_simulation": unknown(tail(output), source)}
    return facts | {"apt_simulation": known(parse_simulation(output.stdout), source)}
