# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest
from gpubox.serving_plan import ACTIVATION_BYTES, GIB, Plan, plan
from hypothesis import given
from hypothesis import strategies as st

CUDA = {"device": "cuda", "serve": {"options": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}}}
CPU = {
    "device": "cpu",
    "serve": {"options": {"dtype": "float32"}, "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}},
}
# config.json of GLM-5 and round sums of the size of its Q4_K_XL
GLM5: dict[str, Any] = {
    "layers": 78,
    "hidden_size": 6144,
    "experts_per_token": 8,
    "expert_layers": 75,
    "heads": 64,
    "index_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "experts": 256,
    "expert_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 202752,
    "mtp_layers": 1,
    "tensor_bytes": 402 * 10**9,
    "weights": {
        "divided": 392 * 10**9,
        "replicated": 4 * 10**9,
        "mtp_divided": 6 * 10**9,
        "mtp_replicated": 10**8,
        "routed": 380 * 10**9,
        "mtp_routed": 5 * 10**9,
    },
    "row_parallel": [[2048, 256], [12288, 256], [16384, 256]],
}


def known(**values: Any) -> dict[str, Any]:
    return {
        name: {"value": value, "unknown": None, "source": "written by the test"}
        for name, value in values.items()
    }


def box(
    cards: int,
    *,
    memory_gib: int = 432,
    card_mib: int = 97887,
    link: str = "pcie_cross_socket",
    capability: str = "12.0",
    name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition",
) -> dict[str, Any]:
    addresses = [f"0000:{16 * (index + 1):02x}:00.0" for index in range(cards)]
    gpus = [
        {
            "index": index,
            "address": address,
            "name": name,
            "memory_total_mib": card_mib,
            "compute_capability": capability,
            "numa_node": 2 * index // cards,
        }
        for index, address in enumerate(addresses)
    ]
    links = {one: {two: link for two in addresses if two != one} for one in addresses}
    return known(
        nvidia_devices=[{"address": address, "revision": "a1"} for address in addresses],
        gpus=gpus,
        gpu_links=links if cards > 1 else {},
        cpu_count=64,
        memory_total_bytes=memory_gib * GIB,
        memory_available_bytes=memory_gib * GIB,
    )


def sizes(result: Plan) -> tuple[int, int, int]:
    return (
        result.tensor_parallel_size,
        result.pipeline_parallel_size,
        result.data_parallel_size,
    )


def test_the_reference_box_uses_every_card() -> None:
    result = plan(box(8), GLM5, CUDA, {"speculative_tokens": 2})
    assert result.faults == []
    assert sizes(result) == (8, 1, 1)
    assert len(result.gpus) == 8
    # 398 GB over eight ranks and 4.1 GB on each
    assert result.weights_bytes_per_gpu == 398 * 10**9 // 8 + 41 * 10**8
    # (656 + 128 + 4) bytes, 78 layers and the MTP layer
    assert result.kv_cache_bytes_per_token_per_gpu == 788 * 79 == 62252
    assert result.gpu_memory_utilization == 0.92
    assert result.max_model_len == 202752
    assert result.kv_cache_tokens is not None
    assert result.kv_cache_tokens > 202752
    assert result.nccl == {"NCCL_PROTO": "LL"}
    assert result.numa == {
        "nodes": [0, 0, 0, 0, 1, 1, 1, 1],
        "node": None,
        "cpus": "",
        "by_rank": False,
    }
    assert any("PCIE_IPC" in note and "measure" in note for note in result.notes)
    assert "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC" not in result.environment
    # 402 GB at the assumed 0.5 GB/s, three times, and the compiles
    assert result.limits["start_timeout_seconds"] == 804 * 3 + 1200


def test_without_mtp_its_layer_costs_nothing() -> None:
    result = plan(box(8), GLM5, CUDA, {})
    assert result.weights_bytes_per_gpu == 53 * 10**9
    assert result.kv_cache_bytes_per_token_per_gpu == 788 * 78


@pytest.mark.parametrize(
    ("memory", "cpus", "most", "jobs"),
    [(288, 64, 0, 12), (432, 64, 0, 18), (900, 64, 0, 32), (900, 64, 40, 38), (432, 8, 0, 8)],
)
def test_build_jobs_stay_within_the_share(memory: int, cpus: int, most: int, jobs: int) -> None:
    facts = box(8, memory_gib=memory) | known(cpu_count=cpus)
    build = plan(facts, GLM5, CUDA, {"max_jobs": most}).build
    assert build["max_jobs"] == jobs
    assert f"85 % of {memory} GiB" in build["arithmetic"]


def test_two_cards_are_too_few_and_the_numbers_say_so() -> None:
    result = plan(box(2, memory_gib=288), GLM5, CUDA, {})
    (fault,) = result.faults
    assert "186.3 GiB of weights a card" in fault["measured"]
    assert result.max_model_len == 202752  # the model's own; nothing is adapted


def test_four_large_cards_serve() -> None:
    facts = box(4, card_mib=143771, capability="9.0", name="NVIDIA H200", link="nvlink")
    result = plan(facts, GLM5, CUDA, {})
    assert result.faults == []
    assert sizes(result) == (4, 1, 1)
    assert result.nccl == {}


def test_six_cards_are_used_by_stages() -> None:
    result = plan(box(6, card_mib=143771), GLM5, CUDA, {})
    assert sizes(result) == (2, 3, 1)
    assert any("64 attention heads do not divide by 6" in note for note in result.notes)


def test_sixteen_ranks_would_cut_a_block() -> None:
    result = plan(box(16), GLM5, CUDA, {})
    assert sizes(result) == (8, 2, 1)
    (fault,) = plan(box(16), GLM5, CUDA, {"tensor_parallel_size": 16}).faults
    assert fault["measured"] == "rows of 2048 do not divide into 16 x blocks of 256"


@pytest.mark.parametrize(
    ("cards", "asked", "expected"),
    [
        (8, {"pipeline_parallel_size": "2"}, (4, 2, 1)),
        (8, {"pipeline_parallel_size": 4, "tensor_parallel_size": 2}, (2, 4, 1)),
        (8, {"pipeline_parallel_size": 2, "data_parallel_size": 2}, (2, 2, 2)),
        (6, {"pipeline_parallel_size": 1}, (4, 1, 1)),
    ],
)
def test_stages_that_are_asked_for(
    cards: int, asked: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    result = plan(box(cards, card_mib=400_000), GLM5, CUDA, asked)
    assert result.faults == []
    assert sizes(result) == expected
    used = expected[0] * expected[1] * expected[2]
    assert (len(result.gpus), len(result.gpus_left_out)) == (used, cards - used)


@pytest.mark.parametrize(
    ("asked", "measured", "wanted"),
    [
        (
            {"pipeline_parallel_size": 9},
            "8 cards for each copy of the model of 78 layers",
            "plan_pipeline_parallel_size: 9",
        ),
        (
            {"pipeline_parallel_size": 4, "tensor_parallel_size": 4},
            "8 cards for each copy of the model and 4 pipeline stages",
            "plan_tensor_parallel_size: 4",
        ),
    ],
)
def test_stages_that_cannot_be(asked: dict[str, Any], measured: str, wanted: str) -> None:
    (fault,) = plan(box(8, card_mib=400_000), GLM5, CUDA, asked).faults
    assert (fault["measured"], fault["wanted"]) == (measured, wanted)
    assert fault["do"].endswith("which plans it")


def test_cards_that_are_asked_not_to_be_used_are_left_out_with_the_reason() -> None:
    result = plan(box(8, card_mib=143771), GLM5, CUDA, {"tensor_parallel_size": "4"})
    assert sizes(result) == (4, 1, 1)
    assert len(result.gpus_left_out) == 4
    assert "4 of 8 cards" in result.gpus_left_out[0]["reason"]


def test_a_workstation_is_refused_with_the_numbers() -> None:
    (fault,) = plan(box(1, memory_gib=128), GLM5, CUDA, {}).faults
    assert "368.8 GiB of weights" in fault["measured"]


def test_a_card_off_the_bus_is_named() -> None:
    facts = box(8)
    facts["nvidia_devices"]["value"][2]["revision"] = "ff"
    facts["gpus"]["value"].pop(2)
    result = plan(facts, GLM5, CUDA, {"expected_gpus": 8})
    assert ["0000:30:00.0" in fault["measured"] for fault in result.faults[:1]] == [True]
    assert result.faults[1]["measured"] == "7 usable cards"
    assert "0000:30:00.0" not in result.gpus


def test_a_card_that_nvidia_smi_lost_is_named_with_its_words() -> None:
    facts = box(8)
    facts["gpus"]["value"].pop(2)
    lost = "Unable to determine the device handle for GPU2: 0000:30:00.0: Unknown Error"
    facts["nvidia_smi_messages"] = {"value": ["note", lost], "unknown": None, "source": "x"}
    (fault,) = plan(facts, GLM5, CUDA, {"tensor_parallel_size": 1}).faults[:1]
    assert fault["measured"] == f"card 0000:30:00.0: the driver does not reach it ({lost})"


def test_cards_that_are_all_lost_to_the_driver_are_named() -> None:
    facts = box(2)
    facts["gpus"] = {"value": [], "unknown": None, "source": "x"}  # No devices were found
    result = plan(facts, GLM5, CUDA, {})
    assert result.gpus == []
    assert len([fault for fault in result.faults if "does not reach it" in fault["measured"]]) == 2
    facts["gpus"] = {"value": None, "unknown": "nvidia-smi is not installed", "source": "x"}
    assert len(plan(facts, GLM5, CUDA, {}).gpus) == 2


def test_a_card_that_the_bus_does_not_show_any_more_is_named() -> None:
    facts = box(8)
    facts["driver_gpus"] = known(x=[one["address"] for one in facts["gpus"]["value"]])["x"]
    assert plan(facts, GLM5, CUDA, {}).faults == []
    address = facts["nvidia_devices"]["value"].pop(5)["address"]
    (fault,) = plan(facts, GLM5, CUDA, {}).faults
    assert fault["measured"] == f"card {address}: the driver has it, the PCI bus not"
    assert fault["wanted"] == "8 cards that answer"


def test_a_card_that_the_driver_did_not_take_is_named() -> None:
    facts = box(8) | {"gpus": {"value": None, "unknown": "failed", "source": "x"}}
    addresses = [one["address"] for one in facts["nvidia_devices"]["value"]]
    facts |= known(driver_gpus=addresses[:-1])
    failed = f"GPU {addresses[-1]}: RmInitAdapter failed! (0x22:0xffff:884)"
    facts |= known(kernel_messages=[failed, "GPU 0000:99:00.0: fine"])
    (fault,) = plan(facts, GLM5, CUDA, {}).faults
    assert fault["measured"] == (
        f"card {addresses[-1]}: the driver has not taken it (/proc/driver/nvidia/gpus) ({failed})"
    )
    assert fault["do"].startswith("switch Above 4G decoding")


def test_a_card_that_is_gone_since_the_last_plan_stops() -> None:
    applied = plan(box(8), GLM5, CUDA, {}).to_dict()
    facts = box(8)
    for name in ("nvidia_devices", "gpus"):
        facts[name]["value"].pop(7)
    faults = plan(facts, GLM5, CUDA, {"applied": applied}).faults
    assert "gone: 0000:80:00.0" in faults[0]["measured"]
    wanted = plan(facts, GLM5, CUDA, {"applied": applied, "expected_gpus": 7})
    assert not any("gone" in fault["measured"] for fault in wanted.faults)


def test_a_mixed_set_and_another_model_are_refused_unless_allowed() -> None:
    facts = box(8)
    facts["gpus"]["value"][7]["memory_total_mib"] = 24576
    (mixed, *_) = plan(facts, GLM5, CUDA, {}).faults
    assert mixed["measured"].startswith("a mixed set: 1 x ")
    allowed = plan(facts, GLM5, CUDA, {"allow_mixed_gpus": True}).faults
    assert not any("mixed" in fault["measured"] for fault in allowed)
    others = plan(box(8), GLM5, CUDA, {"expected_gpu_model": "H200"}).faults
    assert len(others) == 8


def test_old_cards_are_refused() -> None:
    assert len(plan(box(8, capability="8.0"), GLM5, CUDA, {}).faults) == 8


def test_the_context_of_the_operator_is_kept_or_refused() -> None:
    assert plan(box(8), GLM5, CUDA, {"max_model_len": "131072"}).max_model_len == 131072
    (fault,) = plan(box(8), GLM5, CUDA, {"max_model_len": 10**7}).faults
    assert "tokens of KV cache fit" in fault["measured"]


def test_the_demo_keeps_its_sizes() -> None:
    tiny = GLM5 | {
        "layers": 3,
        "heads": 8,
        "max_position_embeddings": 4096,
        "tensor_bytes": 10**7,
        "row_parallel": [[512, 256]],
    }
    facts = known(cpu_count=2, memory_available_bytes=8 * GIB, nvidia_devices=[])
    result = plan(facts, tiny, CPU, {})
    assert result.faults == []
    assert sizes(result) == (1, 1, 1)
    assert result.max_model_len == 2048
    assert result.gpu_memory_utilization is None


def test_without_a_model_the_plan_says_what_waits() -> None:
    result = plan(box(8), None, CUDA, {})
    assert result.faults == []
    assert result.tensor_parallel_size == 8
    assert result.max_model_len is None
    assert any("wait for the model" in note for note in result.notes)


def test_the_order_of_the_cards_changes_nothing() -> None:
    facts = box(8)
    facts["gpus"]["value"].reverse()
    facts["nvidia_devices"]["value"].reverse()
    assert plan(facts, GLM5, CUDA, {}).to_dict() == plan(box(8), GLM5, CUDA, {}).to_dict()


# --- what the operator sets of the server ---------------------------------------------------------


def test_options_of_the_operator_are_planned_with() -> None:
    asked = {"kv-cache-dtype": "auto", "gpu_memory_utilization": "0.8"}
    result = plan(box(8), GLM5, CUDA, {"options": asked})
    assert result.kv_cache_dtype == "auto"
    # (512 + 64) x 2 bytes and the indexer's 132, in 78 layers
    assert result.kv_cache_bytes_per_token_per_gpu == (1152 + 132) * 78
    assert result.gpu_memory_utilization == 0.8
    planned = plan(box(8), GLM5, CUDA, {})
    assert planned.kv_cache_tokens is not None
    assert result.kv_cache_tokens is not None
    assert result.kv_cache_tokens < planned.kv_cache_tokens
    high = plan(box(8), GLM5, CUDA, {"options": {"gpu_memory_utilization": 0.99}})
    assert any("0.99 leaves 1 GiB" in note for note in high.notes)


@pytest.mark.parametrize("wrong", [0, 1.2, "0.0", "much", True, [0.9], -0.5])
def test_a_share_of_memory_that_is_none_is_refused(wrong: Any) -> None:
    faults = plan(box(8), GLM5, CUDA, {"options": {"gpu_memory_utilization": wrong}}).faults
    assert [fault["measured"] for fault in faults] == [f"gpu_memory_utilization {wrong}"]


def test_the_space_for_the_cache_of_a_cpu_may_be_the_operators() -> None:
    facts = known(cpu_count=2, memory_available_bytes=8 * GIB, nvidia_devices=[])
    tiny = GLM5 | {"layers": 3, "heads": 8, "tensor_bytes": 10**7, "index_topk": 10**6}
    tiny |= {"row_parallel": [[512, 256]]}
    few = plan(facts, tiny, CPU, {}).kv_cache_tokens
    many = plan(facts, tiny, CPU, {"environment": {"VLLM_CPU_KVCACHE_SPACE": 2}}).kv_cache_tokens
    assert few == GIB // (3 * 576 * 4) // 64 * 64
    assert many == 2 * GIB // (3 * 576 * 4) // 64 * 64


def test_what_is_asked_for_cards_is_refused_on_a_cpu() -> None:
    facts = known(cpu_count=2, memory_available_bytes=8 * GIB, nvidia_devices=[])
    asked = {"expected_gpus": 8, "expected_gpu_model": "H200", "data_parallel_size": "2"}
    asked |= {"pipeline_parallel_size": 2}
    assert [fault["wanted"] for fault in plan(facts, None, CPU, asked).faults] == [
        "plan_expected_gpus: 8",
        "plan_expected_gpu_model: H200",
        "plan_data_parallel_size: 2",
        "plan_pipeline_parallel_size: 2",
    ]


def test_memory_that_is_not_told_is_noted() -> None:
    facts = box(8)
    for card in facts["gpus"]["value"]:
        card["memory_total_mib"] = None
    result = plan(facts, GLM5, CUDA, {})
    assert any("memory of no card" in note for note in result.notes)
    facts["gpus"]["value"][0]["memory_total_mib"] = 97887
    few = plan(facts, GLM5, CUDA, {"allow_mixed_gpus": True})
    assert any("the memory of card 0000:20:00.0, " in note for note in few.notes)
    assert not any("memory of" in note for note in plan(box(8), GLM5, CUDA, {}).notes)


def test_a_config_json_that_cannot_be_read_is_noted() -> None:
    result = plan(box(8), GLM5 | {"faults": ["/m/config.json: no JSON"]}, CUDA, {})
    assert "/m/config.json: no JSON" in result.notes


# --- NUMA and limits ------------------------------------------------------------------------------

NODES = [{"node": 0, "cpus": "0-31"}, {"node": 1, "cpus": "32-63"}]


def test_cards_on_one_of_two_nodes_bind_the_unit_to_it() -> None:
    facts = box(2, card_mib=400000) | known(numa_nodes=NODES)
    for card in facts["gpus"]["value"]:
        card["numa_node"] = 1
    bound = {"nodes": [1, 1], "node": 1, "cpus": "32-63", "by_rank": False}
    assert plan(facts, GLM5, CUDA, {}).numa == bound
    unbound = {"nodes": [1, 1], "node": None, "cpus": "", "by_rank": False}
    for others in ([], NODES[1:], [NODES[0]], [NODES[0], {"node": 1, "cpus": ""}], None):
        assert plan(facts | known(numa_nodes=others), GLM5, CUDA, {}).numa == unbound
    before = plan(facts, GLM5, CUDA, {}).to_dict()
    facts["gpus"]["value"][0]["numa_node"] = None
    assert plan(facts, GLM5, CUDA, {}).numa["cpus"] == ""
    # unknown now: the same cards keep what is applied
    kept = plan(facts, GLM5, CUDA, {"applied": before}).numa
    assert (kept["node"], kept["cpus"]) == (1, "32-63")
    others = before | {"gpus": ["0000:ff:00.0", "0000:fe:00.0"]}
    assert plan(facts, GLM5, CUDA, {"applied": others}).numa["cpus"] == ""
    odd = before | {"numa": {"cpus": "all of them", "node": 1}}
    assert plan(facts, GLM5, CUDA, {"applied": odd}).numa["cpus"] == ""
    assert plan(box(8) | known(numa_nodes=NODES), GLM5, CUDA, {}).numa["cpus"] == ""


def test_ranks_of_cards_on_several_nodes_are_bound_when_asked() -> None:
    facts = box(8) | known(numa_nodes=NODES)
    for facts_of in (facts, box(8)):
        numa = plan(facts_of, GLM5, CUDA, {"options": {"numa-bind": True}}).numa
        assert numa == {"nodes": [0] * 4 + [1] * 4, "node": None, "cpus": "", "by_rank": True}
    free = plan(facts, GLM5, CUDA, {})
    assert not free.numa["by_rank"]
    (note,) = [note for note in free.notes if "NUMA" in note]
    assert "serving_options: {numa_bind: true}" in note
    asked = plan(facts, GLM5, CUDA, {"options": {"numa_bind": True}})
    assert not any("NUMA" in note for note in asked.notes)


def limit(speed: int | None = None, model: Any = GLM5, **overrides: Any) -> int:
    facts = box(8) | known(read_speeds={"/m": speed} if speed else None)
    return int(plan(facts, model, CUDA, overrides).limits["start_timeout_seconds"])


def applied(seconds: int) -> dict[str, Any]:
    return {"limits": {"start_timeout_seconds": seconds}}


def test_the_start_limit_follows_the_disk_and_does_not_move_with_it() -> None:
    assert limit(2 * 10**9) == 201 * 3 + 1200
    assert limit() == 804 * 3 + 1200  # assumed
    # the same disk, a little slower or faster: what is applied stays
    assert limit(17 * 10**8, applied=applied(1803)) == 1803
    assert limit(6 * 10**9, applied=applied(1803)) == 1803
    # a disk on which it would be too short
    assert limit(5 * 10**8, applied=applied(1803)) == 804 * 3 + 1200
    # unknown: what is applied stays
    assert limit(model=None, applied=applied(1803)) == 1803
    assert limit(model=None) == 1800


def test_the_operators_start_limit_is_kept_and_judged() -> None:
    assert limit(2 * 10**9, start_timeout="600", applied=applied(1803)) == 600
    notes = plan(box(8), GLM5, CUDA, {"start_timeout": 600}).notes
    assert any("serving_start_timeout 600 s may be too short" in note for note in notes)
    assert not any("short" in n for n in plan(box(8), GLM5, CUDA, {"start_timeout": 3600}).notes)


@given(st.integers(10**7, 10**11), st.integers(1, 10**13), st.integers(0, 10**6))
def test_a_limit_never_leaves_less_than_half_of_the_safety(
    speed: int, size: int, before: int
) -> None:
    seconds = limit(speed, GLM5 | {"tensor_bytes": size}, applied=applied(before))
    assert seconds >= size / speed * 1.5
    again = limit(speed, GLM5 | {"tensor_bytes": size}, applied=applied(seconds))
    assert again == seconds


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FACTS = (
    "nvidia_devices",
    "gpus",
    "driver_gpus",
    "kernel_messages",
    "gpu_links",
    "cpu_count",
    "iommu",
    "acs_redirecting",
    "memory_available_bytes",
    "numa_nodes",
    "read_speeds",
)
DEVICE = st.fixed_dictionaries({"address": st.text(max_size=3)}, optional={"revision": JSON})


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(FACTS, JSON)),
    st.lists(DEVICE, max_size=5),
    st.none() | st.fixed_dictionaries({}, optional=dict.fromkeys(GLM5, JSON)),
    st.sampled_from([CUDA, CPU]),
    st.dictionaries(
        st.sampled_from(
            [
                "tensor_parallel_size",
                "max_jobs",
                "pipeline_parallel_size",
                "data_parallel_size",
                "expected_gpus",
                "start_timeout",
                "attention_backend",
                "options",
                "environment",
                "applied",
            ]
        ),
        JSON,
    ),
)
def test_no_facts_crash_the_planner(
    raw: dict[str, Any], devices: Any, model: Any, stack: Any, overrides: Any
) -> None:
    facts = known(**raw) | known(nvidia_devices=devices)
    json.dumps(plan(facts, model, stack, overrides).to_dict())


@given(
    st.integers(1, 20),
    st.integers(0, 24),
    st.integers(0, 90),
    st.integers(1, 4),
    st.integers(1, 2000),
)
def test_invariants(cards: int, asked: int, stages: int, copies: int, memory: int) -> None:
    overrides = {
        "tensor_parallel_size": asked,
        "pipeline_parallel_size": stages,
        "data_parallel_size": copies,
    }
    result = plan(box(cards, memory_gib=memory), GLM5, CUDA, overrides)
    tp, pp, dp = sizes(result)
    assert tp * pp * dp == len(result.gpus)
    assert len(result.gpus) + len(result.gpus_left_out) == cards
    assert pp <= GLM5["layers"]
    # what was asked for is kept or refused
    for name, one, wish in (("tensor", tp, asked), ("pipeline", pp, stages), ("data", dp, copies)):
        said = f"plan_{name}_parallel_size: {wish}"
        assert wish in (0, one) or any(one["wanted"].endswith(said) for one in result.faults)
    assert 64 % tp == 0
    assert 2048 % (tp * 256) == 0
    used = result.build["max_jobs"] * result.build["memory_per_job_bytes"]
    assert used <= memory * GIB * 0.85


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_no_order_of_the_cards_changes_the_plan(lines: list[int], numbers: list[int]) -> None:
    facts = box(8)
    devices, gpus = facts["nvidia_devices"]["value"], facts["gpus"]["value"]
    facts["nvidia_devices"]["value"] = [devices[line] for line in lines]
    facts["gpus"]["value"] = [gpus[line] | {"index": line} for line in numbers]
    assert plan(facts, GLM5, CUDA, {}).to_dict() == plan(box(8), GLM5, CUDA, {}).to_dict()


@given(
    st.integers(1, 16),
    st.sampled_from([24576, 97887, 143771, 183359]),
    st.sampled_from(["0.5", "0.9", "1", None]),
    st.integers(0, 3),
    st.integers(10**9, 10**12),
)
def test_what_is_planned_fits_or_is_refused(
    cards: int, card_mib: int, share: str | None, guesses: int, weights: int
) -> None:
    model = GLM5 | {"weights": GLM5["weights"] | {"divided": weights}, "tensor_bytes": weights}
    overrides = {"speculative_tokens": guesses, "options": {"gpu_memory_utilization": share}}
    result = plan(box(cards, card_mib=card_mib), model, CUDA, overrides)
    assert all(all(fault.values()) for fault in result.faults)
    if result.kv_cache_tokens is None:
        assert result.faults
        return
    assert result.weights_bytes_per_gpu is not None
    assert result.kv_cache_bytes_per_token_per_gpu is not None
    assert result.gpu_memory_utilization is not None
    used = result.weights_bytes_per_gpu + ACTIVATION_BYTES
    used += result.kv_cache_tokens * result.kv_cache_bytes_per_token_per_gpu
    assert used <= card_mib * 1024**2 * result.gpu_memory_utilization
    assert result.max_model_len is not None
    assert 0 < result.max_model_len <= result.kv_cache_tokens
    assert result.concurrent_contexts is not None
    assert result.concurrent_contexts >= 1


@given(st.sets(st.integers(0, 7), max_size=8))
def test_cards_that_are_gone_are_never_adapted_to(left: set[int]) -> None:
    before = plan(box(8), GLM5, CUDA, {}).to_dict()
    facts = box(8)
    for name in ("nvidia_devices", "gpus"):
        facts[name]["value"] = [facts[name]["value"][card] for card in left]
    faults = plan(facts, GLM5, CUDA, {"applied": before}).faults
    assert bool(faults) == (len(left) < 8)


@pytest.mark.parametrize("number", [10**30, 10**400], ids=["long", "longer"])
def test_a_number_that_no_box_has_is_unknown(number: int) -> None:
    facts = box(4) | known(memory_available_bytes=number, read_speeds={"/a": number})
    result = plan(facts, {**GLM5, "tensor_bytes": number}, CUDA, {"max_model_len": number})
    assert result.build["max_jobs"] is None
    assert result.max_model_len != number
    json.dumps(result.to_dict())
