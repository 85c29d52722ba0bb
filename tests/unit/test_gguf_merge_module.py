# SPDX-License-Identifier: Apache-2.0
"""The module as Ansible runs it: arguments, check and diff mode, attributes, errors."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

from tests.unit.gguf_files import ShardSet, shard_set

SOURCE = Path(__file__).resolve().parents[2] / "plugins" / "modules" / "gguf_merge.py"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gguf_merge_module", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def good(tmp_path: Path) -> ShardSet:
    return shard_set(tmp_path / "shards")


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "Model-Q4.gguf"


def run(
    module: ModuleType,
    capsys: pytest.CaptureFixture[str],
    src: Path,
    dest: Path,
    status: int = 0,
    **options: Any,
) -> dict[str, Any]:
    arguments = {"src": str(src), "dest": str(dest), **options}
    with patch_module_args(arguments), pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == status
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_merges_once(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    answer = run(module, capsys, good.paths[1], dest, _ansible_diff=True)
    assert (answer["changed"], answer["action"]) == (True, "merged")
    assert (answer["path"], answer["size"]) == (str(dest), len(good.merged))
    assert (answer["tensors"], len(answer["sources"])) == (7, 3)
    assert answer["diff"]["before"] == "absent\n"
    assert f"size: {len(good.merged)}\ntensors: 7\n" in answer["diff"]["after"]
    assert good.paths[2].name in answer["diff"]["after"]
    assert dest.read_bytes() == good.merged

    again = run(module, capsys, good.paths[1], dest, _ansible_diff=True)
    assert (again["changed"], again["action"]) == (False, "unchanged")
    assert again["diff"]["before"] == again["diff"]["after"]
    assert again["identity"] == answer["identity"]


def test_another_result_has_another_identity(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    first = run(module, capsys, good.paths[0], dest)
    dest.unlink()
    predicted = run(module, capsys, good.paths[0], dest, _ansible_check_mode=True)
    assert (predicted["changed"], "identity" in predicted) == (True, False)
    assert run(module, capsys, good.paths[0], dest)["identity"] != first["identity"]


def test_a_file_that_is_no_gguf_is_named_in_the_diff(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    dest.write_bytes(b"<html>")
    answer = run(module, capsys, good.paths[0], dest, _ansible_diff=True)
    assert "HTML page" in answer["diff"]["before"]


def test_check_mode_predicts_and_writes_nothing(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    options = {"_ansible_check_mode": True, "_ansible_diff": True, "mode": "0600"}
    answer = run(module, capsys, good.paths[0], dest, **options)
    assert (answer["changed"], answer["action"]) == (True, "merged")
    assert "tensors: 7" in answer["diff"]["after"]
    assert not list(dest.parent.iterdir())

    real = run(module, capsys, good.paths[0], dest, mode="0600")
    assert real["changed"]
    answer = run(module, capsys, good.paths[0], dest, **options)
    assert (answer["changed"], answer["action"]) == (False, "unchanged")


def test_check_mode_on_a_bare_box_does_not_fail(
    module: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    src, dest = tmp_path / "none" / "M-00001-of-00002.gguf", tmp_path / "later" / "M.gguf"
    answer = run(module, capsys, src, dest, _ansible_check_mode=True)
    assert (answer["changed"], answer["action"]) == (True, "awaited")
    assert "size" not in answer
    assert "missing" in run(module, capsys, src, dest, status=1)["msg"]


def test_mode_is_kept_right_without_another_merge(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    run(module, capsys, good.paths[0], dest, mode="0640")
    assert dest.stat().st_mode & 0o777 == 0o640
    before = dest.stat().st_ino
    dest.chmod(0o600)
    predicted = run(module, capsys, good.paths[0], dest, mode="0640", _ansible_check_mode=True)
    assert predicted["changed"]
    assert dest.stat().st_mode & 0o777 == 0o600
    answer = run(module, capsys, good.paths[0], dest, mode="0640")
    assert (answer["changed"], answer["action"]) == (True, "unchanged")
    assert dest.stat().st_mode & 0o777 == 0o640
    assert dest.stat().st_ino == before
    assert not run(module, capsys, good.paths[0], dest, mode="0640")["changed"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_and_group(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    run(module, capsys, good.paths[0], dest, owner="12345", group="23456")
    assert (dest.stat().st_uid, dest.stat().st_gid) == (12345, 23456)


def test_a_refusal_shows_all_faults(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    good.paths[0].write_bytes(b"")
    good.paths[2].unlink()
    answer = run(module, capsys, good.paths[0], dest, status=1)
    assert answer["failed"]
    for words in ("measured: 2 faults", "empty (0 bytes)", "missing", "wanted: ", "do: "):
        assert words in answer["msg"]
    assert not list(dest.parent.iterdir())


def test_the_documentation_names_every_parameter_and_answer(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)
    assert set(documented["options"]) == {
        "src", "dest", "method", "verify", "sha256", "origin", "progress_file",
    }  # fmt: skip
    answer = run(module, capsys, good.paths[0], dest)
    ansible_own = {"changed", "diff", "invocation", "failed", "warnings", "deprecations"}
    of_files = {"uid", "gid", "owner", "group", "mode", "state", "secontext"}
    assert set(answer) - ansible_own - of_files == set(yaml.safe_load(module.RETURN))
    example = yaml.safe_load(module.EXAMPLES)[0]["gguf_merge"]
    assert set(example) >= {"src", "dest"}


def test_methods_and_verification_are_passed_on(
    module: ModuleType, capsys: pytest.CaptureFixture[str], good: ShardSet, dest: Path
) -> None:
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in good.paths}
    wrong = {**sums, good.paths[1].name: "0" * 64}
    answer = run(module, capsys, good.paths[0], dest, status=1, sha256=wrong)
    assert f"{good.paths[1]}: sha256 {sums[good.paths[1].name]}" in answer["msg"]
    progress = dest.with_name("progress")
    answer = run(
        module, capsys, good.paths[0], dest,
        sha256=sums, method="in_place", verify=True, progress_file=str(progress),
    )  # fmt: skip
    assert answer["digest"].partition(":")[0] in ("xxh128", "blake2b")
    assert answer["space"]["needed"] == len(good.merged)
    assert not any(path.exists() for path in good.paths)
    assert not progress.exists()
    assert run(module, capsys, good.paths[0], dest, verify=True)["action"] == "unchanged"


def test_progress_is_a_line_in_a_file(module: ModuleType, tmp_path: Path) -> None:
    line = module.Line(tmp_path / "progress")
    line("copying", 0, 2_000_000_000)
    assert (tmp_path / "progress").read_text() == "copying: 0.00 of 2.00 GB\n"
    line("copying", 2_000_000_000, 2_000_000_000)
    assert (tmp_path / "progress").read_text().startswith("copying: 2.00 of 2.00 GB, ")
