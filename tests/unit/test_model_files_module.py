# SPDX-License-Identifier: Apache-2.0
"""The modules as Ansible runs them, from a mirror and a hub to one merged file and back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpubox.errors import GpuboxError
from gpubox.gguf_merge import Method, Options, merge
from gpubox.gguf_merge.journal import Journal
from gpubox.mirror import model_plan

from tests.unit import modules
from tests.unit.file_server import FileServer, cut, status
from tests.unit.gguf_files import ShardSet, shard_set

TYPES = ["F32", "Q8_0", "Q4_K", "Q6_K"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = f"/zai-org/GLM-5/resolve/{COMMIT}/Q4"

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def server(good: ShardSet) -> Iterator[FileServer]:
    one = FileServer()
    one.files = {f"{FOLDER}/{path.name}": path.read_bytes() for path in good.paths}
    one.files["/zai-org/config.json"] = b"{}"
    yield one
    one.close()


@pytest.fixture
def good(tmp_path: Path) -> ShardSet:
    return shard_set(tmp_path / "shards")


@pytest.fixture
def files(good: ShardSet, server: FileServer) -> dict[str, Any]:
    contents = {path.name: path.read_bytes() for path in good.paths} | {"config.json": b"{}"}
    found: dict[str, Any] = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    found["config.json"]["source"] = f"{server.url}/zai-org/config.json"
    return found


class Model:
    """One model of a box: the role's variables, and the modules run with what it makes of them."""

    def __init__(self, source: str, files: dict[str, Any], folder: Path, hub: str) -> None:
        self.source, self.files, self.folder, self.hub = source, files, folder, hub
        self.layout = "merged"
        self.capture: Any = None

    @property
    def plan(self) -> dict[str, Any]:
        return model_plan(
            self.source, self.files, ["config.json"], str(self.folder), "M.gguf", self.layout
        )

    @property
    def shards(self) -> Path:
        return Path(self.plan["shard"]).parent

    def run(self, name: str, failed: bool = False, **options: Any) -> dict[str, Any]:
        return modules.run(name, options, self.capture, failed)

    def fetch(self, failed: bool = False, **options: Any) -> dict[str, Any]:
        plan = self.plan
        arguments = {
            "shard": plan["shard"],
            "source": self.source if plan["fetch"] else "",
            "hub_url": self.hub,
            "files": self.files,
            "quantization_types": TYPES,
            "record": plan["record"],
            "merged": plan["model"] if self.layout == "merged" else "",
            "origin": plan["origin"],
        }
        return self.run("model_files", failed, **(arguments | options))

    def merge(self, method: Method = Method.COPY, **options: Any) -> str:
        plan = self.plan
        given = Options(method, origin=plan["origin"], epoch=700, **options)
        return merge(Path(plan["shard"]), Path(plan["model"]), options=given).action

    def keep(self, keep: str, **options: Any) -> list[str]:
        plan = self.plan
        merged = plan["model"] if self.layout == "merged" else ""
        arguments = {"sets": str(self.folder / "sets"), "shard": plan["shard"], "keep": keep}
        arguments |= {"merged": merged}
        answer = self.run("model_sets", **arguments, **options)
        assert answer["changed"] == bool(answer["removed"])
        return [Path(path).name for path in answer["removed"]]


@pytest.fixture
def model(
    good: ShardSet,
    server: FileServer,
    files: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Model:
    source = f"hf://zai-org/GLM-5@{COMMIT}/Q4/{good.paths[1].name}"
    one = Model(source, files, tmp_path / "srv", server.url)
    one.capture = capsys
    one.folder.mkdir()
    return one


def test_a_set_of_the_hub_is_fetched_once(model: Model, server: FileServer, good: ShardSet) -> None:
    answer = model.fetch(_ansible_diff=True)
    names = sorted(model.files)
    assert (answer["changed"], sorted(answer["fetched"])) == (True, names)
    assert all(name in answer["diff"]["after"] for name in names)
    assert sorted(path.name for path in model.shards.iterdir()) == names
    assert all((model.shards / path.name).read_bytes() == path.read_bytes() for path in good.paths)
    asked = len(server.seen)
    again = model.fetch()
    assert (again["changed"], again["identity"]) == (False, answer["identity"])
    assert len(server.seen) == asked


def test_what_comes_can_be_read_by_the_service_user(model: Model) -> None:
    mask = os.umask(0o077)
    try:
        model.fetch()
    finally:
        os.umask(mask)
    folders = [model.shards, model.shards.parent]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o755, 0o755]
    assert {path.stat().st_mode & 0o777 for path in model.shards.iterdir()} == {0o644}


def test_check_mode_looks_at_the_headers_and_writes_nothing(
    model: Model, server: FileServer
) -> None:
    answer = model.fetch(_ansible_check_mode=True)
    assert (answer["changed"], len(answer["fetched"])) == (True, 4)
    assert list(model.folder.iterdir()) == []
    assert all(asked for _, asked, _ in server.seen)


def test_types_that_no_kernel_reads_cost_headers_only(model: Model, server: FileServer) -> None:
    answer = model.fetch(failed=True, quantization_types=["F32", "Q8_0", "Q6_K"])
    assert "quantization type Q4_K" in answer["msg"]
    assert list(model.folder.iterdir()) == []
    assert all(asked for _, asked, _ in server.seen)


def test_what_failed_is_continued(model: Model, server: FileServer, good: ShardSet) -> None:
    last = max(good.paths, key=lambda path: path.stat().st_size)
    server.plan = {4: status(404)}  # the first request behind three headers and config.json
    assert "404" in model.fetch(failed=True)["msg"]
    assert "config.json" in {path.name for path in model.shards.iterdir()}
    assert last.name not in {path.name for path in model.shards.iterdir()}
    server.plan = {len(server.seen) + 4: cut(100)}
    assert "config.json" not in model.fetch()["fetched"]
    assert len(list(model.shards.iterdir())) == 4


def test_a_damaged_file_is_fetched_again(model: Model) -> None:
    model.fetch()
    path = model.shards / "config.json"
    path.write_bytes(b"[]")
    assert model.fetch()["fetched"] == ["config.json"]
    assert path.read_bytes() == b"{}"


def test_offline_names_what_is_missing(model: Model, server: FileServer) -> None:
    answer = model.fetch(failed=True, offline=True)
    assert "4 faults" in answer["msg"]
    assert server.seen == []
    model.fetch()
    assert not model.fetch(offline=True)["changed"]


def test_the_token_comes_from_its_file_and_is_shown_nowhere(
    model: Model, server: FileServer, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("hunter2\n")
    token.chmod(0o600)
    server.token = "hunter2"  # noqa: S105 - of this test
    answer = model.fetch(token_file=str(token), _ansible_diff=True)
    assert answer["changed"]
    assert "hunter2" not in json.dumps(answer)
    token.write_text("wrong")
    model.files["new.json"] = model.files["config.json"]
    refused = model.fetch(failed=True, token_file=str(token))
    assert "401" in refused["msg"]


def test_merged_shards_may_go_and_are_not_fetched_again(
    model: Model, server: FileServer, good: ShardSet
) -> None:
    model.fetch()
    merged = Path(model.plan["model"])
    assert model.merge() == "merged"
    names = sorted(path.name for path in good.paths)
    assert model.keep("none", _ansible_check_mode=True) == names
    assert len(list(model.shards.iterdir())) == 4
    assert model.keep("none") == names
    assert [path.name for path in model.shards.iterdir()] == ["config.json"]
    assert model.keep("none") == []
    asked = len(server.seen)
    assert not model.fetch()["changed"]
    assert len(server.seen) == asked
    merged.write_bytes(b"another")
    assert sorted(model.fetch()["fetched"]) == names


@pytest.mark.parametrize("interrupted", ["in the copy", "behind the merge"])
def test_an_interrupted_role_does_not_fetch_again_what_a_merge_in_place_took(
    model: Model, server: FileServer, interrupted: str
) -> None:
    model.fetch()
    asked = len(server.seen)

    def stop(what: str, done: int, _: int) -> None:
        if interrupted == "in the copy" and what == "copying" and done > 1500:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        model.merge(Method.IN_PLACE, progress=stop)
    assert Path(model.plan["model"]).exists() == (interrupted == "behind the merge")
    assert not model.fetch()["changed"]
    model.merge(Method.IN_PLACE)
    assert not model.fetch()["changed"]
    assert len(server.seen) == asked
    assert [path.name for path in model.shards.iterdir()] == ["config.json"]


def test_the_merger_of_another_revision_does_not_stand_for_this_one(
    model: Model, server: FileServer, good: ShardSet
) -> None:
    model.fetch()
    model.merge(Method.IN_PLACE)
    before = Path(model.plan["model"]).read_bytes()
    content = bytearray(good.paths[2].read_bytes())
    content[-60] ^= 1  # the same names and sizes
    server.files[f"{FOLDER}/{good.paths[2].name}"] = bytes(content)
    model.files[good.paths[2].name]["sha256"] = hashlib.sha256(content).hexdigest()
    with pytest.raises(GpuboxError, match="missing"):
        model.merge()
    assert sorted(model.fetch()["fetched"]) == sorted(model.files)
    assert model.merge() == "merged"
    assert Path(model.plan["model"]).read_bytes() != before


def test_a_result_that_was_known_gets_its_origin(model: Model) -> None:
    model.fetch()
    merge(Path(model.plan["shard"]), Path(model.plan["model"]))
    assert model.merge() == "unchanged"
    model.keep("none")
    assert not model.fetch()["changed"]


def test_shards_that_are_served_stay(model: Model) -> None:
    model.layout = "shards"
    model.fetch()
    assert model.keep("none") == []
    assert Path(model.plan["model"]).is_file()


def test_older_sets_go_by_policy_and_nothing_else(model: Model) -> None:
    model.layout = "shards"
    model.fetch()
    old = model.shards.name
    (model.folder / "sets" / "mine").mkdir()
    model.files["new.json"] = model.files["config.json"]
    assert model.shards.name != old
    model.fetch()
    assert model.keep("all") == []
    assert model.keep("current") == [old, f"{old}.verified.json"]
    left = {path.name for path in (model.folder / "sets").iterdir()}
    assert left == {"mine", model.shards.name, f"{model.shards.name}.verified.json"}


def test_a_set_that_is_a_link_goes_and_what_it_leads_to_stays(model: Model) -> None:
    model.layout = "shards"
    model.fetch()
    elsewhere = model.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("")
    (model.folder / "sets" / ("0" * 16)).symlink_to(elsewhere)
    assert model.keep("current") == ["0" * 16]
    assert not (model.folder / "sets" / ("0" * 16)).is_symlink()
    assert (elsewhere / "precious").is_file()


def test_a_set_of_the_box_must_be_complete_and_right(model: Model, good: ShardSet) -> None:
    del model.files["config.json"]
    model.source = str(good.paths[0])
    assert not model.fetch()["changed"]
    assert not model.fetch(files={})["changed"]
    content = good.paths[2].read_bytes()
    good.paths[2].write_bytes(content[:-1] + b"\1")
    assert "sha256" in model.fetch(failed=True)["msg"]
    good.paths[2].unlink()
    assert "missing" in model.fetch(failed=True, files={})["msg"]
    refused = model.fetch(failed=True, files={}, quantization_types=["F32"])
    assert "quantization type" in refused["msg"]
    assert good.paths[1].is_file()


def test_a_set_of_the_box_that_is_merged_may_be_gone(model: Model, good: ShardSet) -> None:
    model.source = str(good.paths[0])
    model.files = {}
    merge(good.paths[0], Path(model.plan["model"]))
    for path in good.paths:
        path.unlink()
    assert not model.fetch()["changed"]
    Path(model.plan["model"]).unlink()
    assert not model.fetch(_ansible_check_mode=True)["changed"]
    assert "missing" in model.fetch(failed=True)["msg"]


def test_shards_that_a_merge_in_place_is_taking_away_are_left_alone(
    model: Model, server: FileServer
) -> None:
    """Their content is in the unfinished result; fetching them again would undo it."""
    model.fetch()
    merged = Path(model.plan["model"])
    shard = Path(model.plan["shard"])
    shard.write_bytes(bytes(shard.stat().st_size))
    Journal("binding", "token", True, "xxh128", position=100).write(merged)
    asked = len(server.seen)
    assert not model.fetch()["changed"]
    assert len(server.seen) == asked
    Journal("binding", "token", True, "xxh128", position=0).write(merged)
    shard.unlink()
    assert model.fetch()["fetched"] == [shard.name]
