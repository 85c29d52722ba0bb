# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest
from gpubox.plan_report import differences, options, record, redone, report, table
from gpubox.serving import serve_arguments
from gpubox.serving_plan import GIB, plan
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_serving_plan import CUDA, GLM5, box, known


def planned(cards: int, memory: int, stack: str = "a", **overrides: Any) -> dict[str, Any]:
    result = plan(box(cards, memory_gib=memory), GLM5, CUDA, overrides)
    return {**result.to_dict(), "stack": stack}


def test_columns_are_aligned() -> None:
    lines = table(planned(8, 432))
    assert "GPUs                     8" in lines
    assert "tensor_parallel_size     8" in lines
    assert "RAM                      432 GiB" in lines


def test_from_two_cards_to_eight() -> None:
    before, after = planned(2, 288), planned(8, 432)
    changed = "; ".join(differences(before, after))
    start = "2 → 8 GPUs; RAM 288 → 432 GiB; MAX_JOBS 12 → 18; tensor_parallel_size 2 → 8; "
    assert changed.startswith(start)
    assert "weights per GPU 186.3 → 49.4 GiB" in changed
    assert redone(before, after) == {
        "environment": False,
        "flash-attn": False,
        "unit": True,
        "restart": True,
    }
    again = "environment no, flash-attn no, unit yes, restart yes"
    assert f"redone because of the plan: {again}" in report(before, after)


def test_the_same_plan_changes_nothing_though_free_memory_moves() -> None:
    before = planned(8, 432)
    facts = box(8) | known(memory_available_bytes=300 * GIB)
    after = {**plan(facts, GLM5, CUDA, {}).to_dict(), "stack": "a"}
    assert after["build"] != before["build"]
    assert differences(before, after) == []
    assert not any(redone(before, after).values())
    assert record(before, after) == record(None, before)


def test_a_new_stack_is_a_new_environment() -> None:
    again = redone(planned(8, 432), planned(8, 432, stack="b"))
    assert again["environment"]
    assert again["restart"]


def test_flash_attn_goes_with_its_environment() -> None:
    plain = planned(8, 432)
    wanted = {**plain, "flash_attn": True}
    assert redone(plain, wanted)["flash-attn"]
    assert redone(None, wanted)["flash-attn"]
    assert redone(wanted, {**wanted, "stack": "b"})["flash-attn"]
    assert not redone(wanted, wanted)["flash-attn"]
    assert not redone(wanted, {**plain, "stack": "b"})["flash-attn"]


def test_faults_and_the_first_plan_are_told() -> None:
    lines = report(None, planned(2, 288))
    assert any(line.startswith("fault: measured: 186.3 GiB of weights") for line in lines)
    assert any("nothing was applied before" in line for line in lines)


@pytest.mark.parametrize(("cards", "names"), [(8, set()), (16, {"pipeline_parallel_size"})])
def test_options_of_the_server(cards: int, names: set[str]) -> None:
    given = options(planned(cards, 432, speculative_tokens=2))
    assert given["tensor_parallel_size"] == 8
    assert given["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 2}
    assert {name for name in given if name.endswith("parallel_size")} == {
        "tensor_parallel_size",
        *names,
    }


PLANS = st.builds(
    planned,
    st.integers(1, 9),
    st.sampled_from([288, 432]),
    st.sampled_from("ab"),
    start_timeout=st.sampled_from([0, 600]),
    max_model_len=st.sampled_from([0, 4096]),
)


@given(PLANS, PLANS)
def test_what_is_remembered_is_the_plan_that_was_applied(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    assert differences(now, now) == []
    assert not any(redone(now, now).values())
    kept = json.loads(record(before, now))
    assert differences(kept, now) == []
    assert record(kept, now) == json.dumps(kept, indent=1, sort_keys=True) + "\n"
    # whatever is redone is told
    if any(redone(before, now).values()):
        assert differences(before, now)


def test_a_plan_of_an_older_version_is_compared_with() -> None:
    old = planned(8, 432)
    del old["numa"], old["limits"]
    changed = differences(old, planned(8, 432))
    assert changed == ["start limit unknown → 3612 s"]
    assert redone(old, planned(8, 432))["restart"]


def test_the_cpus_of_the_unit_are_part_of_the_plan() -> None:
    bound = planned(2, 288) | {"numa": {"nodes": [0, 0], "node": 0, "cpus": "0-31"}}
    assert "CPUs of the unit 0-31 → all" in differences(bound, planned(2, 288))
    assert redone(bound, planned(2, 288))["unit"]


def test_the_nodes_that_ranks_are_bound_to_are_part_of_the_plan() -> None:
    before, after = planned(8, 432), planned(8, 432, options={"numa_bind": True})
    for plans in (after, after | {"numa": {"by_rank": True}}):
        assert redone(before, plans)["restart"]
    assert differences(before, after) == ["NUMA nodes of the ranks not bound → 0 0 0 0 1 1 1 1"]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (287.2, 432, "RAM 287.2 → 432 GiB"),
        (None, 432, "RAM unknown → 432 GiB"),
        (432, None, "RAM 432 GiB → unknown"),
    ],
)
def test_a_unit_that_both_have_is_said_once(
    before: float | None, after: float | None, line: str
) -> None:
    plans = [
        planned(8, 432) | {"box": {"memory_total_bytes": size and int(size * GIB)}}
        for size in (before, after)
    ]
    assert line in differences(*plans)


def test_one_variable_takes_the_fallback_of_attention() -> None:
    before = planned(8, 432)
    assert "attention_backend" not in options(before)
    chosen = planned(8, 432, attention_backend="triton")
    assert chosen["faults"] == []
    # fp8 of the stack is packed, as FlashInfer's backend packs it by itself
    arguments = serve_arguments("m", CUDA["serve"]["options"], options(chosen))
    assert arguments[1:3] == ["--attention-backend", "CUSTOM"]
    assert arguments[arguments.index("--kv-cache-dtype") + 1] == "fp8_ds_mla"
    assert chosen["kv_cache_tokens"] == before["kv_cache_tokens"]
    assert differences(before, chosen) == ["attention_backend vLLM's choice → triton"]
    assert differences(chosen, before) == ["attention_backend triton → vLLM's choice"]
    assert redone(before, chosen)["restart"]
    # what earlier versions applied had no such choice
    del before["attention_backend"]
    assert differences(before, planned(8, 432)) == []
    assert not any(redone(before, planned(8, 432)).values())


@pytest.mark.parametrize("given", ["bfloat16", "fp8"])
def test_the_operators_own_kv_cache_is_kept(given: str) -> None:
    chosen = planned(8, 432, attention_backend="triton", options={"kv-cache-dtype": given})
    assert options(chosen)["kv_cache_dtype"] == given


def test_a_backend_that_is_not_there_is_refused() -> None:
    (fault,) = planned(8, 432, attention_backend="cutlass")["faults"]
    assert fault["measured"] == "plan_attention_backend: cutlass"
    cpu = {"device": "cpu", "serve": {"options": {}}}
    (fault,) = plan(box(8), GLM5, cpu, {"attention_backend": "triton"}).faults
    assert "a stack that computes on the CPU" in fault["measured"]
