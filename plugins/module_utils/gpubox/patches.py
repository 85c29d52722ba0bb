# SPDX-License-Identifier: Apache-2.0
"""Series of patches on installed distributions, applied as one transaction.

A series names the exact release that it patches and the sha256 of each file before and after each
patch. Several series make a stack: a later one starts from what the earlier ones leave. Everything
is computed in memory from pristine files and proved by hash before the first byte is written:

1. pristine copies go to the state directory, named by their sha256;
2. the intent is written: each file, its hash now and its hash to be;
3. new contents are staged beside their targets and swapped in by rename, so a file that is a hard
   link into a cache never changes the cache (field report U2);
4. the record is written, then the intent removed.

A run that was killed anywhere in between leaves files whose hashes are all known to the record or
the intent, so the next run, with the same or another stack, starts from the pristine copies again.
The distribution's own RECORD is left alone: it keeps the hash of the wheel's file.
"""

from __future__ import annotations

import base64
import csv
import fcntl
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import unified_diff
from .environment import normalize
from .errors import GpuboxError

DEVICES = ("any", "cpu")
UPSTREAM = ("not sent", "sent", "merged")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PATCH_FILE = re.compile(r"\d{4}-[A-Za-z0-9._-]+\.patch")
# a file that the series made is in no wheel, so a reinstall may leave it
_REINSTALL = (
    "install the distribution again (pristine files from its wheel), or move the whole environment "
    "of gpubox (the folder that holds venv) away; then run again"
)


def sha256(content: bytes | None) -> str | None:
    """Hexadecimal sha256, None for a file that does not exist."""
    return None if content is None else hashlib.sha256(content).hexdigest()


# --- what a series says ---------------------------------------------------------------------------


@dataclass(frozen=True)
class FileChange:
    """sha256 of one file before and after a patch; None where it does not exist."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Patch:
    """One purpose: a patch file and what it makes of each file that it touches."""

    file: str
    purpose: str
    upstream_status: str
    upstream_url: str | None
    test: str
    files: tuple[FileChange, ...]


@dataclass(frozen=True)
class Series:
    """Patches in order for one exact release of a distribution."""

    name: str
    distribution: str
    version: str
    device: str
    purpose: str
    patches: tuple[Patch, ...]


@dataclass
class _Checker:
    """Collects every fault of a definition instead of stopping at the first."""

    faults: list[str] = field(default_factory=list)

    def mapping(self, value: object, where: str, keys: Sequence[str]) -> dict[str, Any]:
        """``value`` as a mapping with exactly ``keys``; what is missing becomes None."""
        if not isinstance(value, Mapping):
            self.faults.append(f"{where} is {type(value).__name__}, not a mapping")
            return dict.fromkeys(keys)
        unknown = sorted(str(key) for key in value if key not in keys)
        if unknown:
            self.faults.append(f"{where} has unknown keys: {', '.join(unknown)}")
        return {key: value.get(key) for key in keys}

    def sequence(self, value: object, where: str) -> list[Any]:
        """``value`` as a list with at least one item."""
        if not isinstance(value, list) or not value:
            self.faults.append(f"{where} is not a list with at least one item")
            return []
        return value

    def text(self, value: object, where: str, choices: Sequence[str] = ()) -> str:
        """``value`` as one line of text, or one of ``choices``."""
        if not isinstance(value, str) or not value.strip() or "\n" in value.strip():
            self.faults.append(f"{where} is {value!r}, not one line of text (quote numbers)")
            return ""
        if choices and value not in choices:
            self.faults.append(f"{where} is {value!r}, not one of: {', '.join(choices)}")
        return value.strip()

    def digest(self, value: object, where: str) -> str | None:
        """``value`` as a sha256, or None (no such file)."""
        if value is None:
            return None
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            self.faults.append(f"{where} is {value!r}, not a sha256 in lower case or null")
            return None
        return value


def _read_files(check: _Checker, value: object, where: str) -> tuple[FileChange, ...]:
    changes: list[FileChange] = []
    for index, item in enumerate(check.sequence(value, f"{where} files"), start=1):
        place = f"{where} file {index}"
        for key in ("before", "after"):
            if isinstance(item, Mapping) and key not in item:
                check.faults.append(f"{place} has no {key!r} (null: no such file)")
        entry = check.mapping(item, place, ["path", "before", "after"])
        path = check.text(entry["path"], f"{place} path")
        fault = unified_diff.path_fault(path) if path else None
        if fault:
            check.faults.append(f"{place} path {path!r} {fault}")
            continue
        before = check.digest(entry["before"], f"{place} before")
        after = check.digest(entry["after"], f"{place} after")
        if path in [change.path for change in changes]:
            check.faults.append(f"{place} names {path} a second time")
        elif path:
            changes.append(FileChange(path, before, after))
    return tuple(changes)


def _read_series(check: _Checker, name: str, definition: object) -> Series:
    where = f"series {name}:"
    top = check.mapping(
        definition, where, ["distribution", "version", "device", "purpose", "patches"]
    )
    patches: list[Patch] = []
    for index, item in enumerate(check.sequence(top["patches"], f"{where} patches"), start=1):
        place = f"{where} patch {index}"
        entry = check.mapping(item, place, ["file", "purpose", "upstream", "test", "files"])
        file = check.text(entry["file"], f"{place} file")
        if file and not _PATCH_FILE.fullmatch(file):
            check.faults.append(f"{place} file {file!r} is not like 0001-purpose.patch")
        if patches and file and file <= patches[-1].file:
            check.faults.append(f"{place} file {file} does not follow {patches[-1].file}")
        upstream = check.mapping(entry["upstream"], f"{place} upstream", ["status", "url"])
        url = upstream["url"]
        patches.append(
            Patch(
                file,
                check.text(entry["purpose"], f"{place} purpose"),
                check.text(upstream["status"], f"{place} upstream status", UPSTREAM),
                None if url is None else check.text(url, f"{place} upstream url"),
                check.text(entry["test"], f"{place} test"),
                _read_files(check, entry["files"], place),
            )
        )
    return Series(
        name,
        check.text(top["distribution"], f"{where} distribution"),
        check.text(top["version"], f"{where} version"),
        check.text(top["device"], f"{where} device", DEVICES),
        check.text(top["purpose"], f"{where} purpose"),
        tuple(patches),
    )


def _chain_faults(stack: Sequence[Series]) -> Iterator[str]:
    """Places where a stack does not fit together."""
    versions: dict[str, tuple[str, str]] = {}
    owner: dict[str, str] = {}
    state: dict[str, tuple[str | None, str]] = {}
    names = [series.name for series in stack]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"series {name} is given {names.count(name)} times"
    for series in stack:
        distribution = normalize(series.distribution)
        version, first = versions.setdefault(distribution, (series.version, series.name))
        if version != series.version:
            yield (
                f"series {series.name} is for {series.distribution} {series.version}, "
                f"series {first} for {version}"
            )
        for patch in series.patches:
            here = f"{series.name}/{patch.file}"
            for change in patch.files:
                if owner.setdefault(change.path, distribution) != distribution:
                    yield f"{here}: {change.path} is patched as a file of {owner[change.path]} too"
                left, by = state.get(change.path, (change.before, ""))
                if left != change.before:
                    yield (
                        f"{here}: {change.path} before is {change.before}, but {by} leaves {left}"
                    )
                if change.before == change.after:
                    yield f"{here}: {change.path} is the same before and after"
                state[change.path] = (change.after, here)


def read_stack(definitions: Sequence[tuple[str, object]]) -> list[Series]:
    """Series from their parsed series.yml, in the order in which they are applied.

    Args:
        definitions: name and parsed content of each series.

    Raises:
        GpuboxError: lists every fault of every series.
    """
    check = _Checker()
    stack = [_read_series(check, name, definition) for name, definition in definitions]
    if not check.faults:
        check.faults += _chain_faults(stack)
    if check.faults:
        raise GpuboxError(
            "\n  ".join([f"{len(check.faults)} faults", *check.faults]),
            "series that follow the format of files/patches/*/series.yml and fit on each other",
            "correct the series",
        )
    return stack


def read_texts(directory: Path, series: Series) -> dict[str, bytes]:
    """Patch texts of a series by ``<series>/<file>``; those that do not exist are left out."""
    found = {}
    for patch in series.patches:
        path = directory / patch.file
        if path.is_file():
            found[f"{series.name}/{patch.file}"] = path.read_bytes()
    return found


# --- what a stack makes of pristine files ---------------------------------------------------------


def compute(
    stack: Sequence[Series], texts: Mapping[str, bytes], pristine: Mapping[str, bytes | None]
) -> dict[str, bytes | None]:
    """Contents of every patched file after the whole stack.

    Args:
        stack: the series in order.
        texts: patch texts by ``<series>/<file>``.
        pristine: content of every file that the stack touches (None: no such file).

    Raises:
        GpuboxError: lists every patch that does not apply exactly, touches other files than it
            declares or leaves another hash than declared. What follows from a fault is left out.
    """
    contents = dict(pristine)
    faults: list[str] = []
    broken: set[str] = set()
    for series in stack:
        for patch in series.patches:
            key = f"{series.name}/{patch.file}"
            declared = {change.path: change for change in patch.files}
            try:
                if key not in texts:
                    raise GpuboxError("the file does not exist", "", "")
                diffs = {diff.path: diff for diff in unified_diff.parse(texts[key])}
                if diffs.keys() != declared.keys():
                    raise GpuboxError(
                        f"changes {', '.join(sorted(diffs))}; "
                        f"series.yml has {', '.join(sorted(declared))}",
                        "",
                        "",
                    )
            except GpuboxError as error:
                faults.append(f"{key}: {error.measured}")
                broken |= declared.keys()
                continue
            for path, change in declared.items():
                if path in broken:
                    continue
                try:
                    contents[path] = unified_diff.apply(diffs[path], contents[path])
                    found = sha256(contents[path])
                    if found != change.after:
                        raise GpuboxError(f"leaves {path} as {found}, not {change.after}", "", "")
                except GpuboxError as error:
                    faults.append(f"{key}: {error.measured}")
                    broken.add(path)
    if faults:
        raise GpuboxError(
            "\n  ".join([f"{len(faults)} faults", *faults]),
            "patches that apply with zero fuzz and leave the hashes of series.yml",
            "make the patch or its hashes again; nothing was changed",
        )
    return contents


# --- what lies on disk ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    """An installed distribution: its version and its ``.dist-info``."""

    name: str
    version: str
    directory: Path

    @functools.cached_property
    def hashes(self) -> Mapping[str, str]:
        """sha256 of each file that RECORD names; empty when it cannot be read."""
        with suppress(OSError, UnicodeDecodeError, csv.Error):
            lines = (self.directory / "RECORD").read_text(encoding="utf-8").splitlines()
            return {row[0]: _record_hash(row[1]) for row in csv.reader(lines) if len(row) >= 2}
        return {}


def find_distribution(site_packages: Path, name: str) -> Distribution | None:
    """The installed distribution of that (normalised) name.

    Raises:
        GpuboxError: several versions' metadata lie side by side (a broken upgrade).
    """
    found = []
    for directory in sorted(site_packages.glob("*.dist-info")):
        stem, _, version = directory.name.removesuffix(".dist-info").rpartition("-")
        if normalize(stem) == normalize(name) and (directory / "METADATA").is_file():
            found.append((directory, version))
    if len(found) > 1:
        raise GpuboxError(
            f"metadata of {name} {' and '.join(version for _, version in found)}",
            "one installed version",
            _REINSTALL,
        )
    if not found:
        return None
    directory, version = found[0]
    return Distribution(name, version, directory)


def _record_hash(text: str) -> str:
    """Hexadecimal sha256 of a RECORD field (urlsafe base64 without padding, PEP 376), or ''."""
    kind, _, encoded = text.partition("=")
    try:
        return base64.urlsafe_b64decode(encoded + "==").hex() if kind == "sha256" else ""
    except ValueError:
        return ""


@dataclass(frozen=True)
class OnDisk:
    """A file below site-packages as it is now; ``content`` is None when it does not exist."""

    content: bytes | None
    mode: int
    owner: tuple[int, int] | None


def read_target(site_packages: Path, path: str) -> OnDisk:
    """Read a file to patch.

    Raises:
        GpuboxError: a symbolic link on the way (writing would leave the environment, or replace
            the link), or not a regular file.
    """
    place = site_packages
    for part in path.split("/"):
        place = place / part
        try:
            info = place.lstat()
        except FileNotFoundError:
            return OnDisk(None, 0o644, None)
        except NotADirectoryError:
            raise GpuboxError(f"{place.parent} is a file", "a directory", _REINSTALL) from None
        if stat.S_ISLNK(info.st_mode):
            raise GpuboxError(
                f"{place} is a symbolic link to {os.readlink(place)}",  # noqa: PTH115 - as stored
                "regular files and directories below site-packages",
                "make the environment with uv's copy link mode",
            )
    if not stat.S_ISREG(info.st_mode):
        raise GpuboxError(f"{place} is not a regular file", "a regular file", _REINSTALL)
    return OnDisk(
        place.read_bytes(), stat.S_IMODE(info.st_mode) & 0o777, (info.st_uid, info.st_gid)
    )


@dataclass(frozen=True)
class FileState:
    """What is known of a patched file: its distribution, and hashes that are ours."""

    distribution: str
    version: str
    pristine: str | None
    patched: str | None
    mode: int
    earlier: str | None = None  # in an intent: the hash when the transaction began


@dataclass(frozen=True)
class Record:
    """What was applied (or, as an intent, is being applied)."""

    series: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, FileState] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)

    def to_json(self) -> bytes:
        """The same bytes for the same record."""
        return (json.dumps({"format": 1, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes) -> Record:
        """Raises ValueError, TypeError or KeyError when it is no record."""
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if data["format"] != 1:
            raise ValueError(f"format {data['format']}")
        files = {str(path): FileState(**state) for path, state in data["files"].items()}
        if any(unified_diff.path_fault(path) for path in [*files, *data["directories"]]):
            raise ValueError("a path that leaves site-packages")
        return cls(list(data["series"]), files, list(data["directories"]))


class Store:
    """The state directory: ``record.json``, ``intent.json`` and ``pristine/<sha256>``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pristine = directory / "pristine"

    def load(self, name: str) -> Record | None:
        """``record`` or ``intent``, None when there is none.

        Raises:
            GpuboxError: it cannot be understood.
        """
        path = self.directory / f"{name}.json"
        try:
            return Record.from_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise GpuboxError(
                f"{path} cannot be understood: {error}",
                "the record of an earlier run",
                f"move {self.directory.parent} away and run again; the environment is built anew",
            ) from error

    def save(self, name: str, record: Record) -> None:
        """Write ``record`` or ``intent`` durably."""
        write_durably(self.directory / f"{name}.json", record.to_json())

    def remove(self, name: str) -> None:
        """Remove ``record`` or ``intent`` durably."""
        (self.directory / f"{name}.json").unlink(missing_ok=True)
        sync_directory(self.directory)

    def keep(self, content: bytes) -> None:
        """Keep a pristine copy."""
        path = self.pristine / str(sha256(content))
        if self.copy(path.name) is None:
            self.pristine.mkdir(mode=0o755, exist_ok=True)
            write_durably(path, content)

    def copy(self, digest: str) -> bytes | None:
        """A pristine copy, None when it is missing or damaged."""
        try:
            content = (self.pristine / digest).read_bytes()
        except FileNotFoundError:
            return None
        return content if sha256(content) == digest else None

    def forget(self, wanted: set[str]) -> None:
        """Remove every pristine copy but those ``wanted``, and what a killed run left."""
        if self.pristine.is_dir():
            for path in self.pristine.iterdir():
                if path.name not in wanted:
                    path.unlink()

    def retire(self) -> None:
        """Remove the state directory when nothing is recorded any more; foreign files stay."""
        self.forget(set())
        for temporary in self.directory.glob(".*.new"):
            temporary.unlink()
        with suppress(OSError):
            self.pristine.rmdir()
        (self.directory / "lock").unlink(missing_ok=True)
        with suppress(OSError):
            self.directory.rmdir()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the state directory against other runs; it is made when missing."""
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GpuboxError(
                    f"another run holds {self.directory}/lock",
                    "one run at a time",
                    "wait for the other run, then run again",
                ) from None
            yield


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    """Write a new file and its data to disk, not through whatever had that name."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
        if owner is not None and os.geteuid() == 0:
            os.fchown(handle, *owner)
        os.fchmod(handle, mode)
        stream.flush()
        os.fsync(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file so that it is old or new after any crash, and new after the return."""
    temporary = path.parent / f".{path.name}.new"
    write_synced(temporary, content, 0o644, None)
    temporary.replace(path)
    sync_directory(path.parent)


# --- the transaction ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One file: as it is now, as it will be and as the wheel has it."""

    path: str
    now: OnDisk
    target: bytes | None
    pristine: bytes | None
    state: FileState

    @property
    def changes(self) -> bool:
        """Whether the file has to be written or removed."""
        return self.now.content != self.target


@dataclass(frozen=True)
class Plan:
    """Everything that a run will do, proved in memory."""

    steps: tuple[Step, ...]
    record: Record
    interrupted: bool
    changed: bool


def describe(stack: Sequence[Series], texts: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """What is applied, for the record and for people: series, their patches and digests."""
    described = []
    for series in stack:
        patches = [
            {
                "file": patch.file,
                "purpose": patch.purpose,
                "sha256": sha256(texts.get(f"{series.name}/{patch.file}")),
            }
            for patch in series.patches
        ]
        identity = json.dumps(asdict(series), sort_keys=True) + json.dumps(patches)
        described.append(
            {
                "name": series.name,
                "distribution": series.distribution,
                "version": series.version,
                "digest": sha256(identity.encode()),
                "patches": patches,
            }
        )
    return described


def _version_faults(stack: Sequence[Series], site_packages: Path, device: str) -> Iterator[str]:
    """Series that this box or this environment must not get."""
    for series in stack:
        if series.device == "cpu" and device != "cpu":
            yield f"series {series.name} is for CPU-only boxes, this one has an NVIDIA device"
        found = find_distribution(site_packages, series.distribution)
        if found is None:
            yield f"{series.distribution} is not installed, {series.name} is for {series.version}"
        elif found.version != series.version:
            yield (
                f"{series.distribution} {found.version} is installed, "
                f"{series.name} is for {series.version}"
            )


def _pristine(
    path: str,
    now: OnDisk,
    wanted: FileState,
    known: set[str | None],
    store: Store,
    installed: Distribution | None,
) -> bytes | None:
    """Pristine content of a file that the stack touches.

    Raises:
        GpuboxError: the file is neither pristine nor in a state of ours, or the copy is lost.
    """
    found = sha256(now.content)
    if found == wanted.pristine:
        return now.content
    if found not in known:
        why = "changed since it was installed"
        if installed is not None and installed.hashes.get(path) == found:
            why = "as the installed wheel has it: the series was made for another build"
        elif wanted.pristine is None:
            why = "not made by an earlier run"
        raise GpuboxError(
            f"{path}: found {found or 'no file'}, expected {wanted.pristine or 'no file'} ({why})",
            "",
            "",
        )
    if wanted.pristine is None:
        return None
    copy = store.copy(wanted.pristine)
    if copy is None:
        raise GpuboxError(
            f"{path}: the pristine copy {wanted.pristine} is missing from {store.directory}", "", ""
        )
    return copy


def _restored(
    path: str,
    now: OnDisk,
    state: FileState,
    known: set[str | None],
    store: Store,
    installed: Distribution | None,
) -> bytes | None:
    """What a file that no series touches any more has to be.

    Raises:
        GpuboxError: it was changed by somebody else, or the pristine copy is lost.
    """
    found = sha256(now.content)
    if installed is None or installed.version != state.version:
        # another release lies there now: its files are its own, only what a patch made is ours
        theirs = installed is not None and path in installed.hashes
        ours = state.pristine is None and found in known and not theirs
        return None if ours else now.content
    if found == state.pristine:
        return now.content
    if found not in known:
        raise GpuboxError(
            f"{path}: found {found or 'no file'}, expected {state.patched or 'no file'} "
            "(changed since it was patched)",
            "",
            "",
        )
    if state.pristine is None:
        return None
    copy = store.copy(state.pristine)
    if copy is None:
        raise GpuboxError(
            f"{path}: the pristine copy {state.pristine} is missing from {store.directory}", "", ""
        )
    return copy


def _missing_directories(site: Path, paths: Sequence[str]) -> list[str]:
    """Directories that have to be made for ``paths``, parents first."""
    found = set()
    for path in paths:
        for parent in Path(path).parents:
            if parent != Path() and not (site / parent).exists():
                found.add(str(parent))
    return sorted(found)


def _wanted(stack: Sequence[Series]) -> dict[str, FileState]:
    """First and last state of every file that a stack touches."""
    wanted: dict[str, FileState] = {}
    for series in stack:
        for patch in series.patches:
            for change in patch.files:
                first = wanted.get(change.path)
                wanted[change.path] = FileState(
                    series.distribution,
                    series.version,
                    first.pristine if first else change.before,
                    change.after,
                    0o644,
                )
    return wanted


def _created(stack: Sequence[Series], path: str) -> set[str | None]:
    """Hashes that a stack gives to a file."""
    return {
        change.after
        for series in stack
        for patch in series.patches
        for change in patch.files
        if change.path == path
    }


def _known(earlier: FileState | None, state: FileState, interrupted: bool) -> set[str | None]:
    """Hashes of a file that are ours and that lead back to the pristine file of ``state``."""
    if earlier is None or earlier.pristine != state.pristine:
        return set()
    known = {earlier.pristine, earlier.patched}
    return known | {earlier.earlier} if interrupted else known


def make_plan(
    site_packages: Path,
    store: Store,
    stack: Sequence[Series],
    texts: Mapping[str, bytes],
    device: str,
) -> Plan:
    """Decide what every file has to be, without writing.

    Args:
        site_packages: the directory of the distributions, resolved.
        store: the state directory.
        stack: the series in order; empty to restore what the wheels had.
        texts: patch texts by ``<series>/<file>``.
        device: ``cpu`` or ``cuda``, what the box has.

    Raises:
        GpuboxError: lists every reason why nothing may be changed.
    """
    faults = list(_version_faults(stack, site_packages, device))
    if faults:
        raise GpuboxError(
            "\n  ".join([f"{len(faults)} faults", *faults]),
            "series made for the installed releases and for this box",
            "install the pinned version or choose the series of the installed one",
        )
    record, intent = store.load("record") or Record(), store.load("intent")
    # an intent names every file of the record that it began with
    earlier = record.files if intent is None else intent.files
    wanted = _wanted(stack)
    installed = {
        state.distribution: find_distribution(site_packages, state.distribution)
        for state in [*earlier.values(), *wanted.values()]
    }

    disk: dict[str, OnDisk] = {}
    origin: dict[str, bytes | None] = {}
    target: dict[str, bytes | None] = {}
    for path, state in {**earlier, **wanted}.items():
        try:
            now = disk[path] = read_target(site_packages, path)
            known = _known(earlier.get(path), state, intent is not None)
            there = installed[state.distribution]
            if path in wanted:
                if state.pristine is None:
                    # what a patch creates needs no copy to go back to: no record is needed either
                    known |= _created(stack, path)
                origin[path] = _pristine(path, now, state, known, store, there)
            else:
                target[path] = _restored(path, now, state, known, store, there)
        except GpuboxError as error:
            faults.append(error.measured)
    if faults:
        raise GpuboxError(
            "\n  ".join([f"{len(faults)} faults", *faults]),
            "files as their wheel has them or as an earlier run left them; nothing was changed",
            "find out who changed the file, " + _REINSTALL,
        )
    target |= compute(stack, texts, origin)

    steps = []
    files: dict[str, FileState] = {}
    for path, state in sorted({**earlier, **wanted}.items()):
        now = disk[path]
        old = earlier.get(path)
        mode = now.mode if old is None else old.mode
        planned = FileState(
            state.distribution,
            state.version,
            state.pristine,
            sha256(target[path]),
            mode,
            earlier=sha256(now.content),
        )
        steps.append(Step(path, now, target[path], origin.get(path), planned))
        if path in wanted:
            files[path] = FileState(
                state.distribution, state.version, state.pristine, sha256(target[path]), mode
            )
    made = _missing_directories(
        site_packages, [path for path in wanted if target[path] is not None]
    )
    directories = sorted({*record.directories, *(intent.directories if intent else []), *made})
    final = Record(describe(stack, texts), files, directories if stack else [])
    return Plan(
        tuple(steps),
        Record(final.series, final.files, directories),
        intent is not None,
        intent is not None or any(step.changes for step in steps) or final != record,
    )


def _staged(site: Path, path: str) -> Path:
    """Where the new content of a file waits; the name is fixed so that it is found again."""
    target = site / path
    return target.parent / f".{target.name}.gpubox-new"


def _purge_bytecode(target: Path) -> None:
    """Remove compiled copies: their check by time and size, or none, could keep the old code."""
    with suppress(FileNotFoundError):
        for cached in list((target.parent / "__pycache__").iterdir()):
            if cached.name.startswith(f"{target.stem}.") and cached.suffix == ".pyc":
                cached.unlink(missing_ok=True)


def _swap(site: Path, step: Step, content: bytes | None) -> None:
    """Make a file what was staged for it, or remove it."""
    target = site / step.path
    if content is None:
        target.unlink(missing_ok=True)
    else:
        _staged(site, step.path).replace(target)
    _purge_bytecode(target)


def _stage(site: Path, step: Step, content: bytes | None) -> None:
    """Write the new content of a file beside it."""
    if content is not None:
        staged = _staged(site, step.path)
        owner = step.now.owner
        if owner is None:
            parent = staged.parent.stat()
            owner = (parent.st_uid, parent.st_gid)
        mode = step.state.mode if step.now.content is None else step.now.mode
        write_synced(staged, content, mode, owner)


def _make_directories(site: Path, directories: Sequence[str], steps: Sequence[Step]) -> None:
    """Make the directories that files need, with the owner of what they lie in."""
    for name in directories:
        path = site / name
        if not path.is_dir() and any(
            step.target is not None and step.path.startswith(name + "/") for step in steps
        ):
            path.mkdir(mode=0o755)
            path.chmod(0o755)
            if os.geteuid() == 0:
                above = path.parent.stat()
                os.chown(path, above.st_uid, above.st_gid)


def _remove_directories(site: Path, directories: Sequence[str]) -> list[str]:
    """Remove directories of ours that hold nothing any more; those that are left."""
    left = []
    for name in sorted(directories, reverse=True):
        path = site / name
        if path.is_dir() and {child.name for child in path.iterdir()} <= {"__pycache__"}:
            with suppress(OSError):
                (path / "__pycache__").rmdir()
            with suppress(OSError):
                path.rmdir()
        if path.is_dir():
            left.append(name)
    return sorted(left)


def execute(site_packages: Path, store: Store, plan: Plan) -> None:
    """Carry a plan out. The caller holds the lock.

    Raises:
        OSError: a write failed; what was swapped was put back.
    """
    for step in plan.steps:
        if step.pristine is not None:
            store.keep(step.pristine)
    intent = Record(
        plan.record.series, {step.path: step.state for step in plan.steps}, plan.record.directories
    )
    store.save("intent", intent)
    changing = [step for step in plan.steps if step.changes]
    swapped: list[Step] = []
    try:
        _make_directories(site_packages, plan.record.directories, changing)
        for step in changing:
            _stage(site_packages, step, step.target)
        for step in changing:
            swapped.append(step)
            _swap(site_packages, step, step.target)
    except OSError:
        for step in reversed(swapped):
            _stage(site_packages, step, step.now.content)
            _swap(site_packages, step, step.now.content)
        for step in changing:
            _staged(site_packages, step.path).unlink(missing_ok=True)
        if not plan.interrupted:
            store.remove("intent")
            _remove_directories(site_packages, plan.record.directories)
        raise
    for step in plan.steps:
        _staged(site_packages, step.path).unlink(missing_ok=True)
        if plan.interrupted:
            _purge_bytecode(site_packages / step.path)
    for directory in {(site_packages / step.path).parent for step in changing}:
        if directory.is_dir():
            sync_directory(directory)
    left = _remove_directories(site_packages, plan.record.directories)
    if plan.record.series:
        store.save("record", Record(plan.record.series, plan.record.files, left))
    else:
        store.remove("record")
    store.remove("intent")
    store.forget({s.pristine for s in plan.record.files.values() if s.pristine is not None})


def converge(
    site_packages: Path,
    state_dir: Path,
    stack: Sequence[Series],
    texts: Mapping[str, bytes],
    device: str,
    check: bool = False,
) -> Plan:
    """Make the distributions hold exactly the stack; an empty stack restores their wheels' files.

    Args:
        site_packages: the directory of the distributions.
        state_dir: where the record and the pristine copies lie.
        stack: the series in order.
        texts: patch texts by ``<series>/<file>``.
        device: ``cpu`` or ``cuda``, what the box has.
        check: only plan.

    Returns:
        What was (or would be) done.

    Raises:
        GpuboxError: a reason why nothing may be changed, or a write that failed.
    """
    site = site_packages.resolve()
    store = Store(state_dir)
    plan = make_plan(site, store, stack, texts, device)
    leftover = not stack and state_dir.is_dir()  # of a run that was killed before its intent
    if check or not (plan.changed or leftover):
        return plan
    try:
        with store.lock():
            # what was planned before the lock was held may be out of date
            plan = make_plan(site, store, stack, texts, device)
            if plan.changed:
                execute(site, store, plan)
            if not stack:
                store.retire()
    except OSError as error:
        raise GpuboxError(
            f"{error.filename or state_dir}: {error.strerror or error}",
            f"the patched files below {site} and {state_dir} to be writable",
            "free space or give permission, then run again (it goes on from what is there)",
        ) from error
    return plan
