# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpubox import decode_model as model
from gpubox.plan_report import differences, record, table
from gpubox.serving_plan import plan
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_serving_plan import CUDA, GLM5, JSON, box

RATE = model.CARDS["RTX PRO 6000 Blackwell"]
SIZES = {**GLM5, **model.GLM5}
DOCS = Path(__file__).resolve().parents[2] / "docs/plan.md"
KINDS = st.sampled_from([model.NCCL_DEFAULT, model.NCCL_LL, model.ONE_SHOT, model.PCIE_IPC])


def reference() -> model.Reads:
    one = model.reads(model.GLM5, model.GLM5_LATENT)
    assert one is not None
    return one


def planned(facts: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    return plan(facts or box(8), SIZES, CUDA, overrides).to_dict()


def predicted(result: dict[str, Any]) -> list[str]:
    return [line for line in table(result) if "predicted, not measured" in line]


def test_what_was_fitted_comes_out_again() -> None:
    one = reference()
    rest = model.rest_milliseconds()

    def historic(kind: str) -> float:
        kernels = model.EXPERTS_HISTORIC
        return 1e3 / model.step_milliseconds(one, RATE, rest, kind=kind, kernels=kernels)

    assert historic(model.NCCL_DEFAULT) == pytest.approx(43.0)
    assert historic(model.NCCL_LL) == pytest.approx(57.0)
    # the series' own kernels save 0.029 ms in each of 75 layers, of 17.5 ms
    saved = 75 * (model.EXPERTS_HISTORIC[1] - model.EXPERTS_PATCHED[1])
    assert 1e3 / model.predict(one, RATE, model.NCCL_LL, 0) == pytest.approx(1e3 / 57 - saved)
    # 5.71 ms of 158 calls; 6.5 ms of a speculating step
    assert model.calls(one) == 158
    saved = 1e3 / 43 - 1e3 / 57
    assert saved == pytest.approx(5.712, abs=0.001)
    assert model.speculation_milliseconds() == pytest.approx(6.53, abs=0.01)


def test_what_was_not_fitted_is_off_by_what_the_page_says() -> None:
    """The check that can fail: a changed input moves these errors."""
    errors = [round(check.error, 1) for check in model.checks()]
    assert errors == [-6.0, 0.0, 2.5, 2.3]
    for check, error in zip(model.checks(), errors, strict=True):
        row = f"| {check.about} | {check.predicted:.1f} | "
        assert row in DOCS.read_text(encoding="utf-8")
        assert abs(error) <= max(abs(check.high), abs(check.low)) * 0.26


def test_the_page_shows_the_predictions() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for kind in (model.NCCL_DEFAULT, model.NCCL_LL, model.ONE_SHOT, model.PCIE_IPC):
        speeds = [model.predict(reference(), RATE, kind, count) for count in range(4)]
        assert f"| {kind} | " + " | ".join(f"{speed:.0f}" for speed in speeds) + " |" in text


def test_bytes_of_a_token_are_those_of_its_parts() -> None:
    facts = {
        **model.GLM5,
        "weights": {"divided": 1000, "routed": 800, "embedding": 40, "head": 80, "replicated": 7},
    }
    one = model.reads(facts, latent=656, context=4096)
    assert one is not None
    assert one.always == (1000 - 800 - 40) / 8 + 7
    assert one.experts == 100
    assert one.experts_read(one.experts, 1) == pytest.approx(100 * 8 / 256)
    assert one.draft_always == 10  # the head again
    # the 2,048 chosen tokens, and the index keys of all 4,096
    assert one.cache == 78 * (2048 * 656 + 4096 * 132)


def test_more_tokens_read_more_distinct_experts() -> None:
    assert model.distinct_experts(256, 8, 1) == pytest.approx(8)
    assert model.distinct_experts(256, 8, 4) == pytest.approx(30.53, abs=0.01)
    assert model.distinct_experts(256, 8, 10**6) == pytest.approx(256)
    assert model.distinct_experts(4, 8, 1) == 4


def test_kernel_times_lie_between_the_measured_ones() -> None:
    times = {1: 0.056, 4: 0.073, 8: 0.128}
    assert model.kernel_milliseconds(times, 1) == 0.056
    assert model.kernel_milliseconds(times, 6) == pytest.approx(0.1005)
    assert model.kernel_milliseconds(times, 16) == pytest.approx(0.256)


@given(st.floats(1e11, 1e14), st.floats(1.01, 4), KINDS, st.integers(0, 3))
def test_faster_memory_is_never_slower(rate: float, factor: float, kind: str, drafts: int) -> None:
    one = reference()
    assert model.predict(one, rate * factor, kind, drafts) >= model.predict(one, rate, kind, drafts)


@given(KINDS, st.integers(0, 3), st.floats(0, 1), st.floats(0, 1))
def test_more_acceptance_is_more_tokens(kind: str, drafts: int, low: float, more: float) -> None:
    few = [low * 0.5] * 3
    many = [low * 0.5 + more * 0.5] * 3
    assert model.tokens_a_step(many, drafts) >= model.tokens_a_step(few, drafts) >= 1
    one, rest = reference(), model.rest_milliseconds()
    times = [
        model.step_milliseconds(one, RATE, rest, kind=kind, drafts=count)
        for count in range(drafts + 1)
    ]
    assert times == sorted(times)


@given(
    st.none() | st.fixed_dictionaries({}, optional=dict.fromkeys(model.GLM5, JSON)),
    st.lists(
        st.sampled_from(["NVIDIA RTX PRO 6000 Blackwell Server Edition", None, 3]), max_size=9
    ),
    st.integers(0, 10**18),
    st.integers(0, 10**18),
)
def test_no_facts_crash_the_model(facts: Any, cards: list[Any], latent: int, drafts: int) -> None:
    result = model.expected(
        facts,
        cards,
        ranks=(8, 1, 1),
        pcie=True,
        latent=latent,
        kind=model.NCCL_LL,
        drafts=drafts,
    )
    json.dumps(result)
    assert model.lines(result)


def test_the_plan_says_what_to_expect_and_that_nobody_measured_it() -> None:
    result = planned()
    lines = table(result)
    (line,) = predicted(result)
    assert "65 tokens/s as configured (NCCL LL, MTP 0; sizes: the model's)" in line
    begin = lines.index(line)
    assert "108 tokens/s (FlashInfer PCIe IPC, MTP 3)" in lines[begin + 1]
    assert lines[begin + 2].startswith("  NCCL LL: MTP 0 65, MTP 1 ")
    assert lines[begin + 3].startswith("  FlashInfer PCIe IPC: MTP 0 70, ")


def test_it_follows_what_is_configured_and_configures_nothing() -> None:
    variables = {"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": 1}
    result = planned(environment=variables, speculative_tokens=2)
    assert "(FlashInfer PCIe IPC, MTP 2;" in predicted(result)[0]
    result = planned(environment={"NCCL_PROTO": "Simple"})
    assert "48 tokens/s as configured (NCCL default, MTP 0;" in predicted(result)[0]
    assert result["nccl"] == {"NCCL_PROTO": "LL"}
    assert result["speculative_tokens"] == 0
    assert "unknown as configured" in predicted(planned(speculative_tokens=7))[0]


def test_what_the_model_does_not_know_is_unknown() -> None:
    for facts, said in (
        (box(8, name="NVIDIA Unheard-of 9000"), "rate of NVIDIA Unheard-of 9000 is not listed"),
        (box(4), "fitted on 8 ranks over PCIe only"),
        (box(8, link="nvlink"), "fitted on 8 ranks over PCIe only"),
    ):
        (line,) = predicted(planned(facts))
        assert "unknown" in line
        assert said in line
    result = plan(box(8), SIZES | {"experts_per_token": None}, CUDA, {}).to_dict()
    assert "do not give the model's sizes" in predicted(result)[0]


def test_without_a_model_it_takes_glm_5_and_says_so() -> None:
    result = plan(box(8), None, CUDA, {}).to_dict()
    assert "65 tokens/s" in predicted(result)[0]
    assert "those of GLM-5 at Q4_K_XL, for want of a model" in predicted(result)[0]


def test_a_prediction_is_no_change_of_the_plan() -> None:
    before = {**planned(), "stack": "a"}
    after = {**before, "expected": {"unknown": "another version"}}
    assert differences(before, after) == []
    assert record(before, after) == record(None, before)
    del before["expected"]  # what an earlier version applied
    assert table(before)
