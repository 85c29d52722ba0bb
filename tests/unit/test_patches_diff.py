# SPDX-License-Identifier: Apache-2.0
"""The reader and applier of unified diffs, held against what git makes."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from pathlib import Path

import pytest
from gpubox.errors import GpuboxError
from gpubox.unified_diff import apply, parse, path_fault
from hypothesis import given, settings
from hypothesis import strategies as st

OLD = b"".join(b"line %d\n" % number for number in range(1, 21))
NEW = (
    OLD.replace(b"line 3\n", b"line three\n")
    .replace(b"line 17\n", b"")
    .replace(b"line 20\n", b"line 20\nline 21\n")
)


def git_diff(old: bytes | None, new: bytes | None, name: str = "pkg/mod.py") -> bytes:
    """The patch that git itself makes of one file."""
    with tempfile.TemporaryDirectory() as directory:
        for side, content in (("a", old), ("b", new)):
            path = Path(directory, side, name)
            path.parent.mkdir(parents=True)
            if content is not None:
                path.write_bytes(content)
        sides = [
            f"{side}/{name}" if content is not None else "/dev/null"
            for side, content in (("a", old), ("b", new))
        ]
        # the names are given with their a/ and b/, so git must not put its own before them
        return subprocess.run(
            ["git", "diff", "--no-index", "--no-prefix", "--text", *sides],
            cwd=directory,
            capture_output=True,
            check=False,
        ).stdout


def patched(old: bytes | None, patch: bytes) -> bytes | None:
    (diff,) = parse(patch)
    return apply(diff, old)


def test_git_patch_gives_the_new_content() -> None:
    patch = git_diff(OLD, NEW)
    assert patch.count(b"\n@@") == 2
    assert patched(OLD, patch) == NEW


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"a\nb\n", b"a\nb"),
        (b"a\nb", b"a\nb\n"),
        (b"a\nb", b"a\nc"),
        (b"a\r\nb\r\n", b"a\r\nc\r\n"),
        (b"a\r\nb\n", b"a\nb\n"),
        (b"\n\n\n", b"\n\nx\n"),
        (b"a\n", b"a\n\x0c\nb\n"),
        (b"gr\xfc\xdfe\n", b"gr\xc3\xbc\xc3\x9fe\n"),
        (b"", b"x\n"),
        (b"x\n", b""),
    ],
)
def test_line_ends_and_bytes_come_through(old: bytes, new: bytes) -> None:
    assert patched(old, git_diff(old, new)) == new


def test_creates_and_deletes() -> None:
    assert patched(None, git_diff(None, NEW)) == NEW
    assert patched(NEW, git_diff(NEW, None)) is None


LINES = st.lists(st.sampled_from([b"a", b"b", b"", b"--- x", b"+++ y", b"@@", b"\\", b"d\r"]))


@settings(max_examples=60, deadline=None)
@given(LINES, LINES, st.booleans(), st.booleans())
def test_any_pair_of_files(
    old: list[bytes], new: list[bytes], old_end: bool, new_end: bool
) -> None:
    before = b"\n".join(old) + (b"\n" if old_end else b"")
    after = b"\n".join(new) + (b"\n" if new_end else b"")
    patch = git_diff(before, after)
    if before == after:
        assert patch == b""
    else:
        assert patched(before, patch) == after


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for patch in (data, b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n" + data):
        with contextlib.suppress(GpuboxError):
            assert parse(patch)


def test_a_patch_mail_is_read() -> None:
    mail = (
        b"From 1234 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] why\n\nBecause.\n---\n pkg/mod.py |"
        b" 2 +-\n\n" + git_diff(OLD, NEW) + b"-- \n2.43.0\n\n"
    )
    assert patched(OLD, mail) == NEW


def test_blank_context_without_its_blank() -> None:
    patch = b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n\n-a\n+b\n"
    assert patched(b"\na\n", patch) == b"\nb\n"


@pytest.mark.parametrize(
    "content",
    [
        b"one more\n" + OLD,  # GNU patch would take another offset
        OLD.replace(b"line 1\n", b"line one\n"),  # GNU patch would take it with fuzz
        OLD.replace(b"line 3\n", b"line three\n"),  # half applied
        NEW,  # applied
        OLD[:40],
        OLD.replace(b"\n", b"\r\n"),
        b"",
        None,
    ],
)
def test_nothing_but_the_exact_file_is_taken(content: bytes | None) -> None:
    with pytest.raises(GpuboxError) as caught:
        patched(content, git_diff(OLD, NEW))
    assert "pkg/mod.py" in str(caught.value)


def test_fault_names_the_line() -> None:
    with pytest.raises(GpuboxError, match=r"line 4 of pkg/mod.py is b'line vier\\n'"):
        patched(OLD.replace(b"line 4\n", b"line vier\n"), git_diff(OLD, NEW))


def test_creating_over_a_file_is_refused() -> None:
    with pytest.raises(GpuboxError, match="exists"):
        patched(b"", git_diff(None, NEW))


def test_deleting_more_than_is_known_is_refused() -> None:
    with pytest.raises(GpuboxError, match=r"1 lines of .* are left"):
        patched(NEW + b"more\n", git_diff(NEW, None))


HEAD = b"--- a/x\n+++ b/x\n"


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (b"", "without any file"),
        (b"hello\n", "without any file"),
        (HEAD, "no hunk"),
        (HEAD + b"@@ -1,2 +1,2 @@\n a\n-b\n", "1 new lines more"),
        (HEAD + b"@@ -1 +1 @@\n-a\n+b\n+c\n", r"b'\+c'"),
        (HEAD + b"@@ -1,2 +1 @@\n-a\n+b\n+c\n", "one more than"),
        (HEAD + b"@@ -1 +1 @@\n-a\n+b\nrubbish\n", "rubbish"),
        (HEAD + b"@@ -1 +1 @@\r\n-a\r\n+b\r\n", "hunk header"),
        (HEAD.replace(b"\n", b"\r\n") + b"@@ -1 +1 @@\n-a\n+b\n", "CR LF"),
        (b"--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "renames"),
        (b"--- x\n+++ x\n@@ -1 +1 @@\n-a\n+b\n", "starts with a/"),
        (b"--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", r"'\.\.'"),
        (b"--- a//etc/x\n+++ b//etc/x\n@@ -1 +1 @@\n-a\n+b\n", "absolute"),
        (b"--- /dev/null\n+++ /dev/null\n@@ -0,0 +1 @@\n+b\n", "both sides"),
        ((HEAD + b"@@ -1 +1 @@\n-a\n+b\n") * 2, "second time"),
        (b"diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", "no rename"),
        (b"diff --git a/x b/x\nnew file mode 100644\nindex 0000000..e69de29\n", "empty file"),
        (b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n", "mode change"),
        (b"diff --git a/x b/x\nindex 1234..5678\nGIT binary patch\nliteral 1\n", "binary"),
    ],
)
def test_refused_patches(patch: bytes, why: str) -> None:
    with pytest.raises(GpuboxError, match=why):
        parse(patch)


def test_hunk_must_land_on_the_line_it_names() -> None:
    with pytest.raises(GpuboxError, match="lands on line 1, not 2"):
        patched(b"a\n", HEAD + b"@@ -1 +2 @@\n-a\n+b\n")


def test_hunks_out_of_order_are_refused() -> None:
    patch = HEAD + b"@@ -2 +2 @@\n-b\n+B\n@@ -1 +1 @@\n-a\n+A\n"
    with pytest.raises(GpuboxError, match="hunk at line 1"):
        patched(b"a\nb\n", patch)


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "a/../b", "./a", "a//b", "a/", "a\\b", "a\nb", ".."]
)
def test_paths_that_are_refused(path: str) -> None:
    assert path_fault(path)


def test_path_that_is_taken() -> None:
    assert path_fault("pkg/sub/mod.py") is None
