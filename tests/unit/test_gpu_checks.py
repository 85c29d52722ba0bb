# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu concludes from numbers; the numbers come from a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GPU = Path(__file__).parents[1] / "gpu"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


serving = load("serving")


def forced(name: str, off: float, noise: float = 0.01, everything: float = 0.2) -> tuple[bool, str]:
    """Judge a text whose log probabilities are all ``off`` by so much."""
    tokens = serving.TEXTS[name][0]
    wanted = {
        f"{name} torch.float32": [[0.0] * tokens],
        f"{name} torch.bfloat16": [[noise] * tokens],
        "sparse all tokens": [[everything] * tokens],
    }
    return serving.judge_forced(name, {name: [[-off] * tokens]}, wanted)


@pytest.mark.parametrize("name", ["golden", "sparse"])
def test_twice_the_noise_of_bfloat16_is_accepted_and_no_more(name: str) -> None:
    assert forced(name, 0.0199)[0]
    assert not forced(name, 0.0201)[0]


def test_few_wrong_tokens_raise_the_mean() -> None:
    wanted = {"golden torch.float32": [[0.0] * 100], "golden torch.bfloat16": [[0.01] * 100]}
    assert not serving.judge_forced("golden", {"golden": [[0.01] * 95 + [1.0] * 5]}, wanted)[0]


def test_attending_to_all_tokens_is_found_out() -> None:
    assert forced("sparse", 0.019, everything=0.2)[0]
    assert not forced("sparse", 0.019, everything=0.03)[0]


def drafts(
    name: str, got: list[int], accepted: int, lead: float = 0.3, drafted: int = 10
) -> tuple[bool, str]:
    """Judge one continuation 1, 2, 3 whose tokens all lead by ``lead``."""
    plain: dict[str, Any] = {"tokens": [[1, 2, 3]], "leads": [[lead] * 3]}
    metrics = {"draft_tokens": drafted, "accepted_tokens": accepted}
    return serving.judge_drafts(name, plain, {"tokens": [got], "metrics": metrics})


def test_drafts_that_are_right_must_be_accepted() -> None:
    assert drafts("drafts", [1, 2, 3], accepted=9)[0]
    assert not drafts("drafts", [1, 2, 3], accepted=8)[0]


@pytest.mark.parametrize("name", ["drafts", "mtp"])
def test_speculation_may_change_the_text_at_a_near_tie_only(name: str) -> None:
    tie = serving.NEAR_TIE[name]
    assert drafts(name, [1, 7, 3], accepted=10, lead=tie)[0]
    assert not drafts(name, [1, 7, 3], accepted=10, lead=tie * 1.1)[0]


def test_no_draft_at_all_is_a_failure() -> None:
    assert not drafts("mtp", [1, 2, 3], accepted=0, drafted=0)[0]


@pytest.mark.parametrize("name", ["run", "serving", "kernels"])
def test_without_a_gpu_it_is_said_that_nothing_was_checked(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(name)

    class Nowhere(type(Path())):  # type: ignore[misc]
        def exists(self, **_: Any) -> bool:
            return False

    monkeypatch.setattr(module, "Path", Nowhere)
    monkeypatch.setattr("sys.argv", [name, *(["--model", "x"] if name == "serving" else [])])
    assert module.main() == 0
    assert "nothing was checked" in capsys.readouterr().out.lower()
