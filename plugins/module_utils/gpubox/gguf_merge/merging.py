# SPDX-License-Identifier: Apache-2.0
"""The whole merge: known already, right already, or checked, copied and published."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from ..errors import GpuboxError
from ..gguf import Header, read_header
from . import system
from .copy import Reread, Sources, Target, stream
from .destination import (
    Space,
    destination_faults,
    in_place_faults,
    pieces,
    require_usable,
    space,
)
from .digest import Ledger, computable, preferred
from .files import companions, partial_file, partial_path, remove_journal, remove_leftovers
from .journal import Journal, begin, binding, read_journal, takes_from_shards
from .manifest import (
    damage,
    known_result,
    record_origin,
    recorded_digest,
    recorded_whole,
    reread,
    write_manifest,
)
from .plan import Plan, make_plan, make_shared_plan
from .progress import Progress, stage
from .shards import alignment_of, combined, foreign_faults, read_set, shard_paths

EPOCH = 1 << 30  # bytes between two entries of the journal

_MEMORY = "Free memory, or raise the limits of memory and of threads (ulimit -v, ulimit -u)"
REMEDIES = {
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _MEMORY,
    errno.EIO: "Look for faults of its disk in the kernel's log, fetch a damaged shard again",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or choose another file system",
}
"""What to do about an error that neither space nor permissions cure."""


class Method(enum.StrEnum):
    """How the bytes come into the result."""

    COPY = "copy"
    IN_PLACE = "in_place"
    REFLINK = "reflink"


def bytes_besides(method: Method, size: int) -> int:
    """Bytes that a merge takes besides its shards, for a set of ``size`` bytes.

    Of a set whose blocks are shared 99.88 % were, measured on XFS and btrfs; a fifth of a per cent
    is reckoned with.
    """
    if method is Method.IN_PLACE:
        return min(size, EPOCH)
    return size // 500 if method is Method.REFLINK else size


def bytes_held(method: Method, dest: Path, sources: Sequence[Path]) -> int:
    """Bytes of an interrupted run that the next one goes on with or gives back before it writes.

    Of a copy that is the unfinished result. In place it is what lies there twice: what has its
    blocks and was not copied yet, or was copied and not yet taken from its shard.
    """
    held, _ = _taken(partial_path(Path(os.path.realpath(dest))))
    if method is Method.REFLINK or not held:
        return 0  # of shared blocks nobody knows how many come free
    if method is Method.IN_PLACE:
        held += sum(taken - size for taken, size in map(_taken, sources))
    return max(held, 0)


def _taken(path: Path) -> tuple[int, int]:
    """Bytes that a file takes on the disk, and its length; nothing when there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_blocks * 512, status.st_size


@dataclass(frozen=True)
class Options:
    """What a merge may be asked for.

    Args:
        method: ``copy``; ``in_place`` takes the content away from the shards as it is copied, and
            removes them at the end; ``reflink`` shares their blocks (XFS, btrfs) in a layout that
            llama.cpp does not read.
        verify: read the result again from the disk and hold it to its digests.
        sha256: name to hexadecimal digest of every shard, to tell foreign ones; empty for none.
        origin: what the shards are, a digest of their publisher's list for example. It is kept in
            the manifest: a result of another origin is not taken for this one when the shards,
            which could tell, are gone.
        epoch: bytes after which the disk is synchronised and the journal written.
        progress: told what is being done.
        notice: told the space before anything is written.
    """

    method: Method = Method.COPY
    verify: bool = False
    sha256: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    epoch: int = EPOCH
    progress: Progress | None = None
    notice: Callable[[Space], None] | None = None


@dataclass(frozen=True)
class Result:
    """What `merge` did, or in check mode would do.

    ``action``: ``merged`` or ``copied`` (written), ``adopted`` (the file was right already, its
    manifest is new), ``unchanged``, ``awaited`` (check mode: the shards are not there yet).
    """

    action: str
    path: Path
    sources: tuple[Path, ...]
    size: int | None  # bytes of the result
    tensors: int | None
    seconds: float
    space: Space | None = None  # where something was or would be written
    resumed: int = 0  # bytes that an interrupted run had done
    digest: str | None = None  # ALGORITHM:DIGEST of the result

    @property
    def changed(self) -> bool:
        """Whether anything on the disk differs from before."""
        return self.action != "unchanged"


def merge(
    src: Path, dest: Path, check_mode: bool = False, options: Options | None = None
) -> Result:
    """Make ``dest`` the merger of the set that ``src`` belongs to; a whole file is copied.

    A symbolic link as ``dest`` is followed. The sources are never written to, but for the method
    ``in_place``. An interrupted run is gone on with by the next one, as far as its journal says.

    Args:
        src: any shard of the set, or a file that was never split.
        dest: the result; when it is ``src`` itself, a whole file, nothing is to be done.
        check_mode: write nothing, also nothing temporary.
        options: see `Options`.

    Raises:
        GpuboxError: all faults of the set, the destination and the space in one message; or the
            copy failed. Then ``dest`` is as it was.
    """
    started = time.monotonic()
    paths = shard_paths(src)
    require_usable(*paths[:1], dest)
    dest = Path(os.path.realpath(dest))
    require_usable(*companions(dest))
    work = _Merge(paths, dest, check_mode, options or Options())
    try:
        result = work.run()
    except (OSError, MemoryError) as caught:
        error = caught if isinstance(caught, OSError) else OSError(errno.ENOMEM, "out of memory")
        remedy = REMEDIES.get(
            error.errno or 0, "Free space, or repair permissions or the file system"
        )
        named = isinstance(error.filename, str | bytes | os.PathLike)  # or a descriptor
        state = f"{dest} is in its place" if work.published else "nothing was published"
        raise GpuboxError(
            f"{os.fsdecode(error.filename) if named else dest}: {error.strerror or error}",
            f"the merger of {len(paths)} files in {dest}",
            f"{remedy}, and run again; {state}.",
        ) from caught
    return replace(result, seconds=time.monotonic() - started)


class _Merge:
    """One call of `merge`."""

    def __init__(
        self, paths: Sequence[Path], dest: Path, check_mode: bool, options: Options
    ) -> None:
        self._paths = paths
        self._dest = dest
        self._check_mode = check_mode
        self._options = options
        self._in_place = options.method is Method.IN_PLACE
        self.published = False  # the result has its name
        self._checked: Mapping[str, str] = {}  # sha256 that the shards were held to

    def run(self) -> Result:
        known = self._known()
        if known is not None:
            return known
        if self._check_mode and not any(path.exists() for path in self._paths):
            return self._result("awaited")
        plan = self._plan()
        if plan is None:
            status = self._dest.stat()
            return self._result("unchanged", status.st_size, len(read_header(self._dest).tensors))
        return self._adopted(plan) or self._written(plan)

    def _result(self, action: str, size: int | None = None, tensors: int | None = None) -> Result:
        digest = None
        if size is not None and not (self._check_mode and action != "unchanged"):
            digest = recorded_digest(self._dest)
        return Result(
            action, self._dest, tuple(self._paths), size, tensors, 0.0, digest=digest
        )  # fmt: skip

    # -- what needs no writing

    def _known(self) -> Result | None:
        """The result of an earlier run, as its manifest proves; verified if asked for."""
        shared = self._options.method is Method.REFLINK
        tensors = known_result(self._paths, self._dest, shared, self._options.origin)
        if tensors is None:
            return None
        if self._options.verify:
            wrong = damage(self._dest, self._options.progress)
            if wrong is None:
                return None  # its blocks were shared: compare with the shards
            if wrong and all(path.exists() for path in self._paths):
                return None  # make it again
            if wrong:
                raise GpuboxError(
                    f"{self._dest}: {', '.join(wrong)}: other bytes than were written",
                    f"the digests of {self._dest.name}'s manifest",
                    "Check the disk, fetch the shards again and repeat.",
                )
        if not self._check_mode:
            record_origin(self._dest, self._options.origin)
        journal = read_journal(self._dest)
        # the bytes that another set's merge in place took are in its unfinished result only
        if not self._check_mode and (
            not takes_from_shards(self._dest)
            or (journal is not None and journal.digest == recorded_whole(self._dest))
        ):
            self._clear(journal)
        return self._result("unchanged", self._dest.stat().st_size, tensors)

    def _clear(self, journal: Journal | None) -> None:
        """Remove what a finished merge no longer needs."""
        if journal is not None and journal.in_place:
            for path in self._paths:
                if system.marked(path)[0] == journal.token:
                    system.remove(path)
        remove_leftovers(self._dest)

    def _adopted(self, plan: Plan) -> Result | None:
        """The result is there, without a manifest that says so."""
        if not _same_header(plan, self._dest):
            return None
        if self._check_mode and not self._options.verify:
            return self._result("adopted", plan.size, len(plan.tensors))
        journal = self._journal(plan)
        if journal is not None and journal.position == plan.size:
            # stopped between the publication and the manifest
            ledger = reread(
                self._dest, plan.size, plan.runs, journal.algorithm, self._options.progress
            )
            right: Ledger | None = ledger if ledger.whole == journal.digest else None
        elif journal is not None and journal.in_place and journal.position:
            return None
        else:
            right = equal(plan, self._dest, self._options)
        if right is None:
            return None
        if not self._check_mode:
            self._remember(plan, right)
            self._clear(journal)
        return self._result("adopted", plan.size, len(plan.tensors))

    # -- the plan

    def _plan(self) -> Plan | None:
        """The checked layout; None when the source, a whole file, is in its place already."""
        headers, faults = read_set(self._paths)
        if not faults and len(self._paths) == 1:
            source = self._paths[0]
            if self._dest.exists() and source.samefile(self._dest):
                return None
        faults += destination_faults(self._dest, headers, self._check_mode)
        plan = None
        if not faults:
            shared = self._options.method is Method.REFLINK
            plan = make_shared_plan(headers) if shared else make_plan(headers)
        if self._in_place:
            faults += in_place_faults(self._dest, headers, self._check_mode)
            if plan is not None and plan.whole:
                faults.append(
                    GpuboxError(
                        f"{self._paths[0]}: not split",
                        "a set of shards to merge in place",
                        f"Rename it to {self._dest}, or merge with the method copy.",
                    )
                )
        journal = None if plan is None else self._journal(plan)
        faults += self._consumed_faults(headers, journal)
        resumes = journal is not None and journal.in_place and journal.position > 0
        if self._options.sha256 and not faults and not resumes:
            faults += self._foreign_faults(headers)
            self._checked = self._options.sha256
        if faults or plan is None:
            wanted = f"{len(self._paths)} whole shards of one set and a usable destination"
            raise combined(faults, wanted)
        return plan

    def _foreign_faults(self, headers: Sequence[Header]) -> list[GpuboxError]:
        progress = self._options.progress
        report = None if progress is None else partial(progress, "sha256 of the shards")
        return foreign_faults(headers, self._options.sha256, report)

    def _journal(self, plan: Plan) -> Journal | None:
        """That of an interrupted run of the same plan."""
        journal = read_journal(self._dest)
        if journal is None or journal.in_place != self._in_place or journal.position > plan.size:
            return None
        if not journal.in_place and not computable(journal.algorithm):
            return None  # the shards have all bytes: begin again
        return journal if journal.binding == binding(plan, self._in_place) else None

    def _consumed_faults(
        self, headers: Sequence[Header], journal: Journal | None
    ) -> list[GpuboxError]:
        """Shards whose content an in-place merge has begun to take away, but not this one."""
        own = None if journal is None or not journal.position else journal.token
        faults = []
        for header in headers:
            token, taken = system.marked(header.path)
            if taken and token != own and not _written_again(header, headers[0], taken):
                faults.append(
                    GpuboxError(
                        f"{header.path}: an unfinished merge in place took content from it",
                        "whole shards, or the journal of that merge beside its result",
                        "Finish that merge with the method in_place, or remove this file and fetch "
                        "it again.",
                    )
                )
            elif self._in_place and own is not None and token != own:
                faults.append(
                    GpuboxError(
                        f"{header.path}: not the file that the unfinished merge in place began "
                        "with",
                        f"the one with {own} in its attribute {system.MARK}",
                        "Put it back; or remove the unfinished result and its journal, and fetch "
                        "the whole set again.",
                    )
                )
        if journal is None and takes_from_shards(self._dest):
            faults.append(
                GpuboxError(
                    f"{partial_path(self._dest)}: holds bytes that an unfinished merge in place "
                    "took from its shards",
                    "that merge to be finished first",
                    "Run it again with its own shards and the method in_place; if they are to be "
                    "fetched again anyway, remove that file and its journal.",
                )
            )
        return faults

    # -- the work

    def _written(self, plan: Plan) -> Result:
        action = "copied" if plan.whole else "merged"
        room = None
        if self._dest.parent.is_dir():
            held = bytes_held(self._options.method, self._dest, self._paths)
            room = space(self._dest, self._at_once(plan), held)
            if self._options.notice is not None:
                self._options.notice(room)
            fault = room.fault(self._dest.parent)
            if fault is not None:
                raise fault
        if self._check_mode:
            return replace(self._result(action, plan.size, len(plan.tensors)), space=room)
        with (
            partial_file(self._dest) as descriptor,
            Target(descriptor) as target,
            locked(plan) if self._in_place else contextlib.nullcontext(),
        ):
            sources = Sources(plan)
            if self._options.method is Method.REFLINK:
                resumed, ledger = 0, self._share(plan, descriptor, target, sources)
            else:
                resumed, ledger = self._copy(plan, descriptor, target, sources)
            publish(plan, descriptor, self._dest)
            self.published = True
            system.sync_folder(self._dest.parent)
        self._remember(plan, ledger)
        self._clear(read_journal(self._dest))
        result = self._result(action, plan.size, len(plan.tensors))
        return replace(result, space=room, resumed=resumed)

    def _remember(self, plan: Plan, ledger: Ledger | None) -> None:
        write_manifest(
            plan, self._dest, ledger, self._checked, self._in_place, self._options.origin
        )

    def _at_once(self, plan: Plan) -> int:
        if self._in_place:
            return min(self._options.epoch, plan.size)
        if self._options.method is Method.REFLINK:
            return sum(end - start for start, end in pieces(plan)[1])
        return plan.size

    def _copy(
        self, plan: Plan, descriptor: int, target: Target, sources: Sources
    ) -> tuple[int, Ledger]:
        """Copy all that is missing; bytes that were there, and the digests."""
        journal = self._journal(plan) or begin(plan, self._in_place, preferred())
        ledger = self._resumed(plan, journal, descriptor)
        resumed = position = ledger.position
        if not position:
            remove_journal(self._dest)
            system.truncate(descriptor, 0)
            if self._in_place:
                require_in_place(self._dest, descriptor, journal.token)
            else:
                system.preallocate(descriptor, 0, plan.size)
        if self._in_place:
            consume(sources, 0, position, journal.token)
        while position < plan.size:
            end = min(position + self._options.epoch, plan.size)
            if self._in_place:
                system.preallocate(descriptor, position, end - position)
            report = stage(self._options.progress, "copying", plan.size, position)
            stream(sources, position, end, ledger, target, report)
            target.sync()
            sources.require_unchanged()
            if self._in_place and self._options.verify:
                # while the shards still have these bytes
                self._require_equal(sources, descriptor, position, end)
            if self._in_place and not position:
                mark(plan, sources, journal.token)
            journal = replace(journal, position=end, digest=ledger.whole)
            journal.write(self._dest)
            if self._in_place:
                consume(sources, position, end, journal.token)
            position = end
        if self._options.verify and not self._in_place:
            self._verify(plan, ledger)
        return resumed, ledger

    def _resumed(self, plan: Plan, journal: Journal, descriptor: int) -> Ledger:
        """Digests of what an interrupted run brought to the disk, read from there again."""
        ledger = Ledger(plan.runs, journal.algorithm)
        if journal.position:
            report = stage(self._options.progress, "reading what is there", journal.position)
            stream(Reread(descriptor), 0, journal.position, ledger, progress=report)
            if ledger.whole == journal.digest:
                return ledger
            if journal.in_place:
                raise GpuboxError(
                    f"{partial_path(self._dest)}: its first {journal.position} bytes are not "
                    "those that were written",
                    f"the digest {journal.digest} ({journal.algorithm})",
                    "The shards no longer have these bytes: check the disk, remove this file and "
                    "its journal, and fetch the set again.",
                )
        return Ledger(plan.runs, journal.algorithm)

    def _verify(self, plan: Plan, ledger: Ledger) -> None:
        path = partial_path(self._dest)
        found = reread(path, plan.size, plan.runs, ledger.algorithm, self._options.progress)
        if found.whole != ledger.whole:
            remove_journal(self._dest)
            raise _not_as_written(path, f"the digest {ledger.whole} ({ledger.algorithm})")

    def _require_equal(self, sources: Sources, descriptor: int, start: int, end: int) -> None:
        wanted, found = Ledger((), preferred()), Ledger((), preferred())
        stream(sources, start, end, wanted)
        stream(Reread(descriptor), start, end, found)
        if wanted.whole != found.whole:
            raise _not_as_written(partial_path(self._dest), f"bytes {start} to {end} of the plan")

    def _share(
        self, plan: Plan, descriptor: int, target: Target, sources: Sources
    ) -> Ledger | None:
        """Share all blocks that can be; digests where they were asked for."""
        system.truncate(descriptor, 0)
        system.truncate(descriptor, plan.size)
        shared, copied = pieces(plan)
        try:
            for position, part in shared:
                with sources.opened(part.source) as source:
                    system.clone(source, descriptor, part.offset, position, part.length)
        except OSError as error:
            if error.errno not in system.UNSUPPORTED:
                raise
            raise GpuboxError(
                f"{self._dest.parent}: blocks cannot be shared with the shards ({error.strerror})",
                "result and shards on one file system that can: XFS with reflink, or btrfs",
                "Merge with the method copy.",
            ) from error
        for start, end in copied:
            stream(sources, start, end, target=target)
        sources.require_unchanged()
        if not self._options.verify:
            return None
        system.sync(descriptor)
        ledger = equal(plan, partial_path(self._dest), self._options)
        if ledger is None:
            raise _not_as_written(partial_path(self._dest), "the bytes of the shards")
        return ledger


def _written_again(header: Header, first: Header, taken: int) -> bool:
    """Whether a shard that a merge in place took content from has it again.

    A download onto the same file leaves the mark. What was taken are whole blocks, a hole until
    they are written, and the first ``taken`` bytes of the first tensor, which then are zeros. Zeros
    of its own make a tensor look taken, so a whole file may be refused, never the other way round.
    """
    start = header.data_start(alignment_of(header, first))
    begin = next((start + tensor.offset for tensor in header.tensors if tensor.size), header.size)
    with header.path.open("rb") as stream:
        if system.has_hole(stream.fileno(), header.size):
            return False
        stream.seek(begin)
        return any(stream.read(min(taken, 1 << 20)))


def _same_header(plan: Plan, dest: Path) -> bool:
    """Whether ``dest`` may be the result already, judged by its header and length."""
    try:
        header = read_header(dest)
    except GpuboxError:
        return False
    return (header.size, header.tensors) == (plan.size, plan.tensors)


def _not_as_written(path: Path, wanted: str) -> GpuboxError:
    return GpuboxError(
        f"{path}: not what was to be written",
        wanted,
        "Check the memory and the disk of this machine; nothing was published.",
    )


def equal(plan: Plan, path: Path, options: Options) -> Ledger | None:
    """Digests of ``path`` if it holds exactly the result of ``plan``; reads both when it may."""
    wanted, found = Ledger(plan.runs, preferred()), Ledger(plan.runs, preferred())
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sources = Sources(plan)
        for start in range(0, plan.size, options.epoch):
            end = min(start + options.epoch, plan.size)
            report = stage(options.progress, "comparing", plan.size, start)
            stream(sources, start, end, wanted)
            stream(Reread(descriptor), start, end, found, progress=report)
            if wanted.whole != found.whole:
                return None
        sources.require_unchanged()
    finally:
        os.close(descriptor)
    return found


def require_in_place(dest: Path, descriptor: int, token: str) -> None:
    """Raise `GpuboxError` if this file system cannot give blocks back or mark files."""
    try:
        system.preallocate(descriptor, 0, system.PAGE)
        system.punch(descriptor, 0, system.PAGE)
        system.mark(descriptor, token, 0)
        system.unmark(descriptor)
    except OSError as error:
        if error.errno not in system.UNSUPPORTED:
            raise
        raise GpuboxError(
            f"{dest.parent}: its file system cannot merge in place ({error.strerror})",
            "one that punches holes and keeps extended attributes: ext4, XFS, btrfs",
            "Merge with the method copy.",
        ) from error
    system.truncate(descriptor, 0)


@contextlib.contextmanager
def locked(plan: Plan) -> Iterator[None]:
    """Keep other merges in place away from the shards: each of them has this first one too."""
    path = plan.sources[0].path
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuboxError(
                f"{path}: in use by another merge in place",
                "one merge in place at a time",
                "Wait for it, or end it, and run again.",
            ) from None
        yield
    finally:
        os.close(descriptor)


def mark(plan: Plan, sources: Sources, token: str) -> None:
    """Say on every shard that it is the one that this merge began with."""
    for index in range(len(plan.sources)):
        path = sources.path(index)
        with sources.opened(index, os.O_RDWR) as descriptor, system.blaming(path):
            system.mark(descriptor, token, 0)
            system.sync(descriptor)


def consume(sources: Sources, start: int, end: int, token: str) -> None:
    """Take from the shards what the result has from ``start`` to ``end``.

    Each range is punched from its beginning, so that pages at the bounds of epochs go too.
    """
    for index, parts in groupby(sources.ranges(start, end), lambda part: part.source):
        path = sources.path(index)
        with sources.opened(index, os.O_RDWR) as descriptor, system.blaming(path):
            first, *others = parts
            if not system.marked(descriptor)[1]:
                system.mark(descriptor, token, first.length)
                system.sync(descriptor)
            for part in (first, *others):
                system.punch(descriptor, part.offset, part.length)
                sources.changed_by_us(part.source, descriptor)


def publish(plan: Plan, descriptor: int, dest: Path) -> None:
    """Give the finished file its name, once it is on the disk and its header is what was planned.

    The name is to be brought to the disk then.
    A file that it replaces hands on its mode and, as far as we may, its owner.
    """
    partial = partial_path(dest)
    written = read_header(partial)
    if (written.tensors, written.size) != (plan.tensors, plan.size):
        raise _not_as_written(partial, f"{len(plan.tensors)} tensors in {plan.size} bytes")
    try:
        old = dest.stat()
    except FileNotFoundError:
        pass
    else:
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
    system.sync(descriptor)
    system.rename(partial, dest)
