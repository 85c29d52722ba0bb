# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu concludes from numbers; the numbers come from a GPU."""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import subprocess
import sys
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
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


serving = load("serving")
sys.modules["serving"] = serving  # true_sizes imports it from its own folder
true_sizes = load("true_sizes")
sys.modules["kernels"] = load("kernels")
compiler = load("compile")
sys.modules["tune_experts"] = tune = load("tune_experts")


def forced(
    text: str, off: float, noise: float = 0.01, everything: float = 0.2, check: str = ""
) -> tuple[bool, str]:
    """Judge a text whose log probabilities are all ``off`` by so much."""
    tokens, key = serving.TEXTS[text][0], f"model {text}"
    wanted = {f"{key} float32": [[0.0] * tokens], f"{key} bfloat16": [[noise] * tokens]}
    if tokens > serving.TOPK:
        wanted[f"{key} all tokens"] = [[everything] * tokens]
    return serving.judge_forced(check or text, key, {text: [[-off] * tokens]}, wanted)


@pytest.mark.parametrize("text", ["golden", "sparse", "long"])
def test_twice_the_noise_of_bfloat16_is_accepted_and_no_more(text: str) -> None:
    assert forced(text, 0.0199)[0]
    assert not forced(text, 0.0201)[0]


def test_an_fp8_cache_may_cost_more() -> None:
    assert forced("sparse", 0.0399, check="fp8")[0]
    assert not forced("sparse", 0.0401, check="fp8")[0]


def test_few_wrong_tokens_raise_the_mean() -> None:
    key = "model golden"
    wanted = {f"{key} float32": [[0.0] * 100], f"{key} bfloat16": [[0.01] * 100]}
    served = {"golden": [[0.01] * 95 + [1.0] * 5]}
    assert not serving.judge_forced("golden", key, served, wanted)[0]


@pytest.mark.parametrize("text", ["sparse", "long"])
def test_attending_to_all_tokens_is_found_out(text: str) -> None:
    assert forced(text, 0.019, everything=0.2)[0]
    assert not forced(text, 0.019, everything=0.03)[0]


def same(
    check: str, got: list[int], lead: float = 0.3, tie: float = 0.5, **other: Any
) -> tuple[bool, str]:
    """Judge one continuation 1, 2, 3 whose tokens all lead by ``lead``."""
    plain: dict[str, Any] = {"tokens": [[1, 2, 3]], "leads": [[lead] * 3]}
    metrics = {
        "draft_tokens": other.get("drafted", 10),
        "accepted_tokens": other.get("accepted", 9),
    }
    answer = {"tokens": [got], "metrics": metrics, "graphs": other.get("graphs", 5)}
    return serving.judge_same(check, tie, plain, answer)


@pytest.mark.parametrize("check", ["drafts", "drafts graphs"])
def test_drafts_that_are_right_must_be_accepted(check: str) -> None:
    assert same(check, [1, 2, 3], accepted=9)[0]
    assert not same(check, [1, 2, 3], accepted=8)[0]


@pytest.mark.parametrize("check", ["drafts", "mtp", "graphs", "mtp graphs"])
def test_the_text_may_change_at_a_near_tie_only(check: str) -> None:
    assert same(check, [1, 7, 3], lead=0.5)[0]
    assert not same(check, [1, 7, 3], lead=0.51)[0]


def test_no_draft_at_all_is_a_failure() -> None:
    assert not same("mtp", [1, 2, 3], accepted=0, drafted=0)[0]


def test_no_graph_at_all_is_a_failure() -> None:
    assert not same("graphs", [1, 2, 3], graphs=0)[0]
    assert same("mtp", [1, 2, 3], graphs=0)[0]


def test_every_check_fails_when_no_engine_answers() -> None:
    lines = serving.judged({})
    assert len({check for check, _, _ in lines}) == len(lines) == 19
    assert not any(passed for _, passed, _ in lines)


@pytest.mark.parametrize(
    ("engines", "checks"),
    [
        (["model", "model+usual experts"], {"golden", "sparse", "long", "experts"}),
        (["model+usual experts"], set()),
        (["foreseeing", "foreseeing+mtp"], {"drafts"}),
        (["Q4_K", "model+fp8"], {"Q4_K", "fp8"}),
        (["model", "model+packed"], {"golden", "sparse", "long", "packed forced", "packed"}),
    ],
)
def test_only_checks_of_the_engines_that_were_asked_for_are_judged(
    engines: list[str], checks: set[str]
) -> None:
    assert {check for check, _, _ in serving.judged({}, engines)} == checks
    assert serving.parts(engines)[-len(engines) :] == engines
    assert ("reference" in serving.parts(engines)) == bool(checks - set(serving.SAME))


def test_only_references_that_an_engine_is_compared_with_are_computed() -> None:
    assert serving.compared(["model+packed", "Q4_K", "foreseeing"]) == {
        "model": ("golden",),
        "Q4_K": ("golden",),
    }
    assert serving.compared(["model+fp8", "model"]) == {"model": ("golden", "sparse", "long")}
    assert not serving.compared(["model+mtp"])


def test_every_check_names_engines_that_there_are() -> None:
    for part, key in serving.FORCED.values():
        assert key.split()[1] in serving.ENGINES[part][1]
    for pair in serving.SAME.values():
        assert set(pair) < set(serving.ENGINES)
    assert {part for part, _ in serving.FORCED.values()} == {
        part for part, (_, forced, _) in serving.ENGINES.items() if forced
    }


def run_serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engines: list[str], broken: str = ""
) -> tuple[int, list[str]]:
    """Exit status with stand-ins for the engines, and which parts were started."""
    started = []

    def run(command: list[str], log: Path, *_: Any) -> Any:
        part = command[command.index("--part") + 1]
        started.append(part)
        log.write_text("")
        answer = {"tokens": [[1]], "leads": [[1.0]], "metrics": {"draft_tokens": 1}}
        answer["metrics"]["accepted_tokens"] = 1
        if part != broken:
            (folder / f"{part}.json").write_text(json.dumps(answer))
        return subprocess.Popen(["false" if part == broken else "true"])

    monkeypatch.setattr(serving, "write_models", lambda _: {})
    monkeypatch.setattr(serving, "run", run)
    argv = ["serving", "--cpu", "--out", str(folder), "--engines", *engines]
    monkeypatch.setattr("sys.argv", argv)
    return serving.main(), started


def test_what_was_not_asked_for_neither_runs_nor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["foreseeing", "foreseeing+mtp"]
    assert run_serving(tmp_path, monkeypatch, pair) == (0, pair)
    assert capsys.readouterr().out.startswith("PASS drafts ")
    assert run_serving(tmp_path, monkeypatch, pair, broken=pair[1])[0] == 1
    assert "FAIL drafts            an engine did not answer" in capsys.readouterr().out


def test_an_engine_that_no_check_needs_must_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_serving(tmp_path, monkeypatch, ["foreseeing"]) == (0, ["foreseeing"])
    assert capsys.readouterr().out.endswith("foreseeing: nothing was checked\n")
    assert run_serving(tmp_path, monkeypatch, ["foreseeing"], broken="foreseeing")[0] == 1


def loaded(seconds: float, cold: float | None, from_disk: float) -> bool:
    """Judge 100 GB in so many seconds, of a machine that reads 10 GB/s."""
    size = 100e9
    read = [{"bytes": size, "seconds": 10.0, "from disk": size * from_disk}] * 2
    load = {"seconds": seconds, "build": 1.0, "from disk": size * from_disk}
    return bool(true_sizes.judge_load(load, read, cold)[0])


def test_a_file_on_the_disk_comes_at_four_fifths_of_the_machines_rate() -> None:
    assert loaded(12.4, None, from_disk=1.0)
    assert not loaded(12.6, None, from_disk=1.0)
    assert not loaded(12.4, None, from_disk=0.5), "half of it was in the page cache"


def test_a_file_in_the_page_cache_is_no_slower_than_on_the_disk() -> None:
    assert loaded(12.4, 12.5, from_disk=0.0)
    assert not loaded(12.6, 12.5, from_disk=0.0)
    assert not loaded(12.4, 12.5, from_disk=0.5)


def test_beginnings_get_what_the_long_text_gave_them() -> None:
    long = [-5.0, -7.0] * 4088  # a deviation of 1
    served = {str(true_sizes.LONG): [long]}
    for off, passes in ((0.14, True), (0.16, False), (float("nan"), False)):
        for length in true_sizes.PREFIXES:
            served[str(length)] = [[value + off for value in long[: length - 1]]]
        assert true_sizes.judge_prefixes(served)[0] == passes


SASS = """
        .type           down_kernel,@function
.text.down_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   IADD3 R4, R4, 0x8, RZ ;
.L_x_1:
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R7], desc[UR8][R2.64] ;
        /*0030*/                   HMMA.16816.F32.BF16 R8, R8, R12, RZ ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/              @!P2 BRA `(.L_x_2) ;
.L_x_3:
        /*0060*/                   BRA `(.L_x_3);
"""


def test_the_loop_over_the_weights_is_the_innermost_with_products() -> None:
    assert [line.split()[0] for line in compiler.loop(SASS)] == [
        "LDGSTS.E.BYPASS.128",
        "HMMA.16816.F32.BF16",
        "BRA",
    ]
    assert compiler.loop(SASS.replace("HMMA", "FFMA")) == []


@pytest.mark.parametrize(
    ("columns", "least"), [(256, 2), (512, 2), (1024, 4), (2048, 32), (6144, 32)]
)
def test_what_is_timed_as_patched_is_what_the_series_takes(columns: int, least: int) -> None:
    """The thresholds of patch 0014."""
    assert tune.usual_kernel(least - 1, columns) == "vec"
    assert tune.usual_kernel(least, columns) == "tiled"
    patch = next((GPU.parents[1] / "files/patches/vllm-gguf-plugin-0.0.5").glob("0014-*.patch"))
    assert "return 2 if columns <= 512 else 4 if columns <= 1024 else 32" in patch.read_text()


@pytest.mark.parametrize(
    "name", ["run", "serving", "kernels", "attention", "true_sizes", "tune_experts", "tune_linear"]
)
def test_without_a_gpu_it_is_said_that_nothing_was_checked(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(name)

    class Nowhere(type(Path())):  # type: ignore[misc]
        def exists(self, **_: Any) -> bool:
            return False

    monkeypatch.setattr(module, "Path", Nowhere)
    monkeypatch.setattr("sys.argv", [name])
    assert module.main() == 0
    assert "nothing was checked" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("errors", [[float("nan"), 0.001], [0.001, float("nan")], [0.001, 0.006]])
def test_one_wrong_part_is_enough(errors: list[float]) -> None:
    """``max`` and comparisons lose what is no number."""
    kernels = sys.modules["kernels"]
    assert kernels.accepted([0.001, 0.002], 0.006) == "error 0.0020"
    with pytest.raises(AssertionError):
        kernels.accepted(errors, 0.006)


def test_a_kernel_that_does_not_compile_is_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Here(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, jobs: int, **_: Any) -> None:
            super().__init__(jobs)

    monkeypatch.setattr(tune.concurrent.futures, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(tune, "tiles", lambda *_: [(4, 16), (8, 16)])
    monkeypatch.setattr(tune, "compile_one", lambda *job: "" if job[3][2] else f"{job[3]}: no")
    arguments = argparse.Namespace(jobs=2, types=["Q4_K", "Q5_K"], rank_of=8)
    assert tune.compile_all("", None, arguments) == 4
    assert capsys.readouterr().out.count("FAIL (") == 4


@pytest.mark.parametrize("name", ["compile", "dispatch", "interpret"])
def test_without_the_plugin_it_is_said_that_nothing_was_checked(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", GPU / f"{name}.py"], capture_output=True, text=True
    )  # -S: no packages, whatever is installed beside the tests
    assert done.returncode == 1
    assert "is not installed in this environment: nothing was checked" in done.stderr


@pytest.mark.parametrize("name", ["compile", "interpret", "selector"])
def test_help_needs_neither_a_gpu_nor_the_plugin(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-S", GPU / f"{name}.py", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")


def test_tuning_judges_the_chosen_tiles_only() -> None:
    found = {
        "gate_up": {"stock": (0.03, 0.1), "pairs 4/16*": (0.01, 0.3), "pairs 8/16": (0.02, 0.2)},
        "down": {"stock": (0.03, 0.1), "pairs 4/16*": (0.02, 0.3), "expert 4/16*": (0.001, 0.9)},
    }
    assert tune.goals({1: found}, 4) == [
        "GOAL missed: times as fast as stock, 1 token: 2.00, wanted 3.0"
    ]
    numbers = "0.0600 - 0.0300 0.0110"
    best = "gate/up pairs 4/16*, down expert 4/16*"
    assert " ".join(tune.summary(found, "pairs").split()) == f"{numbers} {best}"
    half = {"gate_up": found["gate_up"], "down": {}}  # is not what both need
    assert tune.summary(half, "pairs").split()[:4] == ["-"] * 4
    many = {
        "gate_up": {"expert 4/32*": (0.2, 0.6), "expert 8/32": (0.1, 0.9)},
        "down": {"expert 4/16*": (0.2, 0.4)},
    }
    assert tune.goals({64: many}, 4) == [
        "GOAL met: share of the copy bandwidth, gate_up, 64 tokens: 0.60, wanted 0.5",
        "GOAL missed: share of the copy bandwidth, down, 64 tokens: 0.40, wanted 0.5",
    ]
    assert tune.goals({1: {"gate_up": {}, "down": {}}}, 4) == []


def test_true_sizes_tells_a_check_as_soon_as_it_can() -> None:
    long = [-4.0, -5.0, -6.0] * 3000
    served = {str(true_sizes.LONG): [long[: true_sizes.LONG - 1]]}
    served |= {str(n): [long[: n - 1]] for n in true_sizes.PREFIXES}
    load = {"seconds": 5.0, "build": 1.0, "from disk": 0.0}
    texts = {"tokens": [[1]], "leads": [[1.0]], "graphs": 3}
    read = {"bytes": 18e9, "seconds": 9.0, "from disk": 18e9}
    warm = {**served, **texts, "load": load}
    cold = {**texts, "load": {**load, "seconds": 10.0, "from disk": 18e9}}
    assert not true_sizes.judged({"warm": [], "cold": [], "read": [read]})
    assert set(true_sizes.judged({"warm": [warm], "cold": [], "read": [read]})) == {"prefixes"}
    half = true_sizes.judged({"warm": [warm], "cold": [cold], "read": [read] * 2})
    assert set(half) == {"prefixes", "warm", "graphs"}
    whole = true_sizes.judged({"warm": [warm], "cold": [cold], "read": [read] * 3})
    assert set(whole) == {"prefixes", "warm", "graphs", "cold"}
    assert all(passed for passed, _ in whole.values())
