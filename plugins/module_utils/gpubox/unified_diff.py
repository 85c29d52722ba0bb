# SPDX-License-Identifier: Apache-2.0
"""Unified diffs, read strictly and applied with zero fuzz.

Everything is bytes and a line ends with LF only, so CR LF files and a missing final newline come
through unchanged. What GNU patch would guess (another offset, missing context, a reversed patch) is
an error here. Format: the GNU diffutils manual, "Detailed Description of Unified Format", and
git-diff(1), "Generating patch text with -p".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from .errors import GpuboxError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?$", re.DOTALL)
# lines that git puts between "diff --git" and "---" and that say nothing that matters here
_GIT_HEADER = re.compile(
    rb"(?:index [0-9a-f]+\.\.[0-9a-f]+|new file mode 100644|deleted file mode )"
)
_NO_NEWLINE = b"\\ "  # the words that follow are translated by some diff programs
_REMEDY = "make the patch again with git diff (text files, a/ and b/ prefixes, no renames)"


@dataclass(frozen=True)
class Hunk:
    """One changed place: the lines ``old`` at ``old_start`` (1-based) become ``new``."""

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """All changes of one file, named relative to the root of the tree."""

    path: str
    creates: bool
    deletes: bool
    hunks: tuple[Hunk, ...]


def path_fault(path: str) -> str | None:
    """Why ``path`` does not name a file below a directory, or None when it does."""
    if not path or any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "is empty or holds control characters"
    if path.startswith("/"):
        return "is absolute"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "has an empty, '.' or '..' component"
    if "\\" in path or str(PurePosixPath(path)) != path:
        return "is not a plain relative path"
    return None


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their LF; only the last one may lack it."""
    *lines, last = content.split(b"\n")
    return [line + b"\n" for line in lines] + ([last] if last else [])


@dataclass
class _Reader:
    """The lines of a patch and the place where reading stands."""

    lines: list[bytes]
    position: int = 0
    found: list[FileDiff] = field(default_factory=list)

    def peek(self, ahead: int = 0) -> bytes | None:
        """The line ``ahead`` of the current one without its LF, None behind the end."""
        index = self.position + ahead
        return self.lines[index].removesuffix(b"\n") if index < len(self.lines) else None

    def fault(self, what: str, wanted: str) -> GpuboxError:
        """An error at the current line."""
        return GpuboxError(f"line {self.position + 1} of the patch {what}", wanted, _REMEDY)

    def name(self, prefix: bytes, side: bytes) -> str | None:
        """Path of a ``---`` or ``+++`` line, None for /dev/null."""
        line = self.peek() or b""
        if line.endswith(b"\r"):
            raise self.fault("ends with CR LF", "header lines that end with LF")
        text = line.removeprefix(prefix).split(b"\t")[0]
        if text == b"/dev/null":
            return None
        try:
            name = text.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"names {text!r}", "a path in UTF-8") from None
        if not text.startswith(side + b"/"):
            raise self.fault(f"names {name!r}", f"a path that starts with {side.decode()}/")
        fault = path_fault(name[2:])
        if fault:
            raise self.fault(f"names {name!r}, which {fault}", "a path below site-packages")
        return name[2:]

    def at_names(self) -> bool:
        """Whether a pair of ``---`` and ``+++`` lines comes next."""
        return (self.peek() or b"").startswith(b"--- ") and (self.peek(1) or b"").startswith(
            b"+++ "
        )

    def hunk(self) -> Hunk:
        """Read one hunk, exactly as many lines as its header counts."""
        header = self.peek() or b""
        match = _HUNK.match(header)
        if match is None or header.endswith(b"\r"):
            raise self.fault(f"reads {header[:80]!r}", "a hunk header that ends with LF")
        old_start, new_start = int(match[1]), int(match[3])
        old_left, new_left = int(match[2] or 1), int(match[4] or 1)
        self.position += 1
        old: list[bytes] = []
        new: list[bytes] = []
        while old_left or new_left:
            line = self.peek()
            if line is None:
                raise self.fault("is missing", f"{old_left} old and {new_left} new lines more")
            # GNU diff may leave out the blank that marks an empty context line
            kind, body = line[:1] or b" ", line[1:] + b"\n"
            if kind not in (b" ", b"-", b"+"):
                raise self.fault(
                    f"reads {line[:80]!r}", f"{old_left} old and {new_left} new lines more"
                )
            if (kind != b"+" and not old_left) or (kind != b"-" and not new_left):
                raise self.fault(
                    "is one more than the hunk header counts", f"the header {header!r} to be right"
                )
            self.position += 1
            if (self.peek() or b"").startswith(_NO_NEWLINE):
                body = body.removesuffix(b"\n")
                self.position += 1
            if kind != b"+":
                old.append(body)
                old_left -= 1
            if kind != b"-":
                new.append(body)
                new_left -= 1
        return Hunk(old_start, new_start, tuple(old), tuple(new))

    def file(self) -> None:
        """Read the names and hunks of one file."""
        old = self.name(b"--- ", b"a")
        self.position += 1
        new = self.name(b"+++ ", b"b")
        if old is not None and new is not None and old != new:
            raise self.fault(f"renames {old!r} to {new!r}", "the same path on both sides")
        path = new if new is not None else old
        if path is None:
            raise self.fault("names /dev/null on both sides", "a path")
        if any(path == other.path for other in self.found):
            raise self.fault(f"names {path!r} a second time", "each file once")
        self.position += 1
        hunks = []
        while (self.peek() or b"").startswith(b"@@"):
            hunks.append(self.hunk())
        if not hunks:
            raise self.fault("is no hunk", f"a hunk of {path!r}")
        self.found.append(FileDiff(path, old is None, new is None, tuple(hunks)))


def parse(data: bytes) -> list[FileDiff]:
    """The files that a patch changes, in its order.

    Text before the first file (a mail header, a reason) and a mail signature at the end are passed
    over; any other line outside a hunk is an error, because it is most often a miscounted hunk.

    Raises:
        GpuboxError: not a unified diff, or a rename, a copy, a mode change, a binary or an empty
            file, a path that leaves the tree, a CR LF header.
    """
    reader = _Reader(split_lines(data))
    while (line := reader.peek()) is not None:
        if line.startswith(b"diff --git "):
            reader.position += 1
            while _GIT_HEADER.match(reader.peek() or b""):
                reader.position += 1
            if not reader.at_names():
                raise reader.fault(
                    f"reads {(reader.peek() or b'the end')[:80]!r} after {line[:80]!r}",
                    "a text change: no rename, copy, mode change, binary or empty file",
                )
        elif reader.at_names():
            reader.file()
        elif not reader.found or not line.strip():
            reader.position += 1
        elif line == b"-- ":  # the signature of git format-patch
            break
        else:
            raise reader.fault(f"reads {line[:80]!r}", "a hunk, another file or the end")
    if not reader.found:
        raise GpuboxError("a patch without any file", "at least one changed file", _REMEDY)
    return reader.found


def apply(diff: FileDiff, content: bytes | None) -> bytes | None:
    """The content of a file after its diff; None stands for a file that does not exist.

    Raises:
        GpuboxError: a line of the file is not what the diff says it is, at exactly its number.
    """
    wanted = f"{diff.path} as the patch knows it, every line at its number (zero fuzz)"
    remedy = "make the patch again against the pristine distribution"
    if (content is None) != diff.creates:
        there = "does not exist" if content is None else "exists"
        raise GpuboxError(f"{diff.path} {there}", wanted, remedy)
    lines = split_lines(content or b"")
    result: list[bytes] = []
    cursor = 0
    for hunk in diff.hunks:
        # a side without lines names the line before the place (diffutils manual)
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        if start < cursor or start > len(lines):
            raise GpuboxError(
                f"{diff.path} has {len(lines)} lines, hunk at line {hunk.old_start}", wanted, remedy
            )
        result += lines[cursor:start]
        if len(result) != (hunk.new_start - 1 if hunk.new else hunk.new_start):
            raise GpuboxError(
                f"hunk of {diff.path} at line {hunk.old_start} lands on line {len(result) + 1}, "
                f"not {hunk.new_start}",
                wanted,
                remedy,
            )
        for number, expected in enumerate(hunk.old, start=start):
            found = lines[number] if number < len(lines) else b""
            if found != expected:
                raise GpuboxError(
                    f"line {number + 1} of {diff.path} is {found!r}, the patch has {expected!r}",
                    wanted,
                    remedy,
                )
        result += hunk.new
        cursor = start + len(hunk.old)
    result += lines[cursor:]
    if any(not line.endswith(b"\n") for line in result[:-1]):
        raise GpuboxError(f"a line without end in the middle of {diff.path}", wanted, remedy)
    if diff.deletes:
        if result:
            raise GpuboxError(f"{len(result)} lines of {diff.path} are left", wanted, remedy)
        return None
    return b"".join(result)
