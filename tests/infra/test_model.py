# SPDX-License-Identifier: Apache-2.0
"""The model's files on the box."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

pytestmark = pytest.mark.model


def test_the_model_is_one_gguf_file(host: Any, model: dict[str, Any]) -> None:
    merged = host.file(model["file"])
    assert merged.is_file
    assert (merged.user, merged.group, merged.mode) == ("root", "root", 0o644)
    assert host.check_output("head -c 4 %s", model["file"]) == "GGUF"


def test_the_merged_file_holds_what_the_shards_hold(host: Any, model: dict[str, Any]) -> None:
    """Tensor data outweighs the headers: the sizes agree, less the headers of the shards."""
    if not model["source"]:
        pytest.skip("the shards were removed after the merge")
    shards = host.check_output("stat -c %%s %s/*.gguf", model["source"]).split()
    assert len(shards) > 1
    total = sum(map(int, shards))
    assert 0.9 * total < host.file(model["file"]).size <= total + 4096


def test_nothing_half_made_lies_beside_the_model(host: Any, model: dict[str, Any]) -> None:
    folder = PurePosixPath(model["file"])
    found = set(host.file(str(folder.parent)).listdir())
    assert {name for name in found if name.endswith((".part", ".tmp"))} == set()
    assert set(model["companions"]) | {folder.name} <= found


def test_the_companions_can_be_read_by_the_service(host: Any, model: dict[str, Any]) -> None:
    folder = PurePosixPath(model["file"]).parent
    modes = {name: host.file(str(folder / name)).mode for name in model["companions"]}
    assert modes == dict.fromkeys(model["companions"], 0o644)
    assert host.file(str(folder)).mode & 0o005 == 0o005
