# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gpubox import preflight
from gpubox.errors import GpuboxError
from gpubox.gguf import read_header
from gpubox.model_facts import read_config
from gpubox.preflight import Finding
from hypothesis import given
from hypothesis import strategies as st

from demo.tiny_glm5.model import Dimensions
from demo.tiny_glm5.writer import write
from tests.unit.modules import load

module = load("preflight")

DEBIAN = {"ID": "debian"}
UBUNTU = {"ID": "ubuntu", "ID_LIKE": "debian"}


def checks(findings: list[Finding]) -> list[str]:
    return [finding.check for finding in findings]


def test_supported_hosts_pass() -> None:
    assert preflight.check_host("systemd", DEBIAN, "x86_64") == []
    assert preflight.check_host("systemd", UBUNTU, "x86_64") == []


def test_every_fault_of_the_host_is_listed_at_once() -> None:
    found = preflight.check_host("bash", {"ID": "fedora"}, "aarch64")
    assert checks(found) == ["init", "system", "architecture"]
    assert checks(preflight.check_host("", None, None)) == ["init", "system", "architecture"]


@pytest.mark.parametrize(
    ("wanted", "box", "named"),
    [("cuda", "cpu", "glm5-cpu"), ("cpu", "cuda", "glm5-cu130")],
)
def test_a_stack_of_the_other_device_is_refused(wanted: str, box: str, named: str) -> None:
    (finding,) = preflight.check_device("some-stack", wanted, box)
    assert named in finding.remedy
    assert preflight.check_device("some-stack", box, box) == []


@pytest.mark.parametrize(
    ("config", "device", "size", "length", "expected"),
    [
        (None, "cpu", 3, 10**6, []),
        ({"num_attention_heads": 64}, "cuda", 8, 4096, []),
        ({"num_attention_heads": 64}, "cuda", 6, 4096, ["parallel"]),
        ({"num_attention_heads": 64}, "cuda", 0, 4096, ["parallel"]),
        ({"index_topk": 2048}, "cpu", 1, 2048, []),
        ({"index_topk": 2048}, "cpu", 1, 2049, ["context"]),
        ({"index_topk": 2048}, "cuda", 1, 131072, []),
        ({"max_position_embeddings": 4096}, "cuda", 1, 4097, ["context"]),
        ({"n_routed_experts": 168, "num_experts": 256}, "cuda", 1, 1, ["config"]),
        ({"n_routed_experts": 256, "num_experts": 256}, "cuda", 1, 1, []),
        ({"index_n_heads": 32}, "cuda", 1, 1, []),
        ({"index_n_heads": 4}, "cuda", 1, 1, ["config"]),
        ({"index_n_heads": 4}, "cpu", 1, 1, []),
    ],
)
def test_the_plan_against_config_json(
    config: dict[str, Any] | None, device: str, size: int, length: int, expected: list[str]
) -> None:
    assert checks(preflight.check_model(config, device, size, length)) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, None),
        ({"kv-cache-dtype": "fp8_ds_mla", "block_size": 128}, None),
        ({"dtype": "float16"}, "dtype float16"),
        ({"kv-cache-dtype": "bfloat16"}, "kv_cache_dtype bfloat16"),
        ({"block_size": 32}, "block_size 32"),
        ({"block-size": "big"}, "block_size big"),
        ({"decode_context_parallel_size": 8}, "decode_context_parallel_size 8"),
        ({"attention_backend": "flashinfer_mla_sparse_sm120"}, None),
        ({"attention-backend": "FLASHMLA_SPARSE"}, "attention_backend FLASHMLA_SPARSE"),
    ],
)
def test_options_that_no_backend_of_these_cards_takes(
    options: dict[str, Any], said: str | None
) -> None:
    found = preflight.check_options(options, None, ["12.0", "12.0"])
    assert [finding.measured for finding in found] == ([said] if said else [])
    assert preflight.check_options(options, None, ["9.0"]) == []
    assert preflight.check_options(options, None, []) == []


def test_binding_ranks_needs_numactl() -> None:
    (finding,) = preflight.check_numa_bind({"numa-bind": True}, False)
    assert "python_env_extra_packages" in finding.remedy
    assert preflight.check_numa_bind({"numa_bind": True}, True) == []
    assert preflight.check_numa_bind({"numa_bind": False}, False) == []


@pytest.mark.parametrize("capability", ["12.0", "9.0"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla"}, None),
        ({"kv-cache-dtype": "bfloat16"}, None),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"dtype": "float16"}, "dtype float16"),
        ({"block_size": 32}, "block_size 32"),
        ({"decode_context_parallel_size": 8}, "decode_context_parallel_size 8"),
    ],
)
def test_options_that_the_fallback_does_not_take(
    options: dict[str, Any], said: str | None, capability: str
) -> None:
    """As tests/gpu/selector.py finds them with vLLM's own selector."""
    given = {"attention_backend": "custom"} | options
    found = preflight.check_options(given, {"index_topk": 1024}, [capability])
    assert [finding.measured for finding in found] == ([said] if said else [])


def test_the_kernel_of_these_cards_knows_one_index_topk() -> None:
    assert preflight.check_options({}, {"index_topk": 2048}, ["12.0"]) == []
    (finding,) = preflight.check_options({}, {"index_topk": 1024}, ["12.0"])
    assert finding.measured == "index_topk 1024"


STACKS = sorted((Path(__file__).resolve().parents[2] / "stacks").glob("*.yml"))


def tensors_of(*layers: int, **changed: str | None) -> dict[str, str]:
    """Tensors by name; ``changed`` names a part with _ for ., and None leaves it out."""
    parts = {
        **dict.fromkeys((f"indexer.{part}" for part in preflight.INDEXER), "F32"),
        "attn_output.weight": "Q5_K",
        "ffn_gate_exps.weight": "Q4_K",
        "ffn_up_exps.weight": "Q4_K",
        "ffn_down_exps.weight": "Q5_K",
    }
    for name, kind in changed.items():
        part = next(part for part in parts if part.replace(".", "_") == name)
        if kind is None:
            del parts[part]
        else:
            parts[part] = kind
    return {f"blk.{layer}.{part}": kind for layer in layers for part, kind in parts.items()}


@pytest.mark.parametrize("stack", STACKS, ids=[path.stem for path in STACKS])
@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, None),
        (tensors_of(0, 1, 2), None),
        (tensors_of(0, attn_output_weight="MXFP4"), "1 tensors of quantization type MXFP4"),
        (tensors_of(0, 1, attn_output_weight="NVFP4"), "2 tensors of quantization type NVFP4"),
        (tensors_of(0, attn_output_weight="BF16"), None),
        (tensors_of(0, ffn_down_exps_weight="BF16"), "1 tensors of quantization type BF16"),
        (tensors_of(3, ffn_up_exps_weight="Q5_K"), "two types in layers 3 (Q4_K, Q5_K)"),
        (tensors_of(0, indexer_proj_weight=None), "the first is blk.0.indexer.proj.weight"),
    ],
)
def test_tensors_that_the_loader_cannot_take(
    stack: Path, tensors: dict[str, str], said: str | None
) -> None:
    types = yaml.safe_load(stack.read_text())["quantization_types"]
    found = preflight.check_tensors("glm-dsa", tensors, types)
    assert len(found) == (said is not None)
    assert said is None or said in found[0].measured


def test_what_an_absent_shard_holds_is_not_missing_from_the_model() -> None:
    tensors = tensors_of(0, indexer_proj_weight=None, attn_output_weight="MXFP4")
    types = ["F32", "Q4_K", "Q5_K"]
    (found,) = preflight.check_tensors("glm-dsa", tensors, types, complete=False)
    assert "MXFP4" in found.measured
    assert len(preflight.check_tensors("glm-dsa", tensors, types)) == 2


def test_a_layer_may_share_the_indexer_of_another() -> None:
    tensors = tensors_of(0) | tensors_of(1, indexer_proj_weight=None)
    for indexers, faults in ((["full", "shared"], 0), (["full", "full"], 1), ("nonsense", 1)):
        config = {"indexer_types": indexers}
        types = ["F32", "Q4_K", "Q5_K"]
        assert len(preflight.check_tensors("glm-dsa", tensors, types, config)) == faults


def test_another_architecture_is_refused() -> None:
    for architecture in ("llama", None):
        found = preflight.check_tensors(architecture, {"output.weight": "F32"}, ["F32"])
        assert [finding.wanted for finding in found] == ["glm-dsa"]


@given(
    st.none() | st.text(),
    st.dictionaries(
        st.text()
        | st.from_regex(
            r"blk\.[0-9a-f]{1,3}\.(indexer\.proj|ffn_up_exps|x)\.weight", fullmatch=True
        ),
        st.sampled_from(["F32", "Q4_K", "MXFP4"]),
    ),
)
def test_no_tensors_break_it(architecture: str | None, tensors: dict[str, str]) -> None:
    for finding in preflight.check_tensors(architecture, tensors, ["F32", "Q4_K"]):
        assert finding.severity == "error"


HEADER = {
    "glm-dsa.block_count": 79,
    "glm-dsa.embedding_length": 6144,
    "glm-dsa.expert_count": 256,
    "glm-dsa.attention.head_count": 64,
    "glm-dsa.attention.indexer.top_k": 2048,
    "general.quantization_version": 2,
}
SIZES = {
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "hidden_size": 6144,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "index_topk": 2048,
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"num_nextn_predict_layers": "1", "num_hidden_layers": 79}, []),
        ({"num_hidden_layers": 79}, []),  # the next-token layer was not converted
        ({"num_hidden_layers": 61}, ["num_hidden_layers 61 and 1 next-token layers"]),
        ({"hidden_size": 7168}, ["hidden_size 7168 in config.json, embedding_length 6144"]),
        (
            {"n_routed_experts": 168, "index_topk": 512},
            ["n_routed_experts 168", "index_topk 512 in config.json, attention.indexer.top_k 2048"],
        ),
        ({"hidden_size": None, "n_routed_experts": "256"}, []),
    ],
)
def test_config_json_against_the_header(changed: dict[str, Any], said: list[str]) -> None:
    found = preflight.check_header(SIZES | changed, HEADER)
    assert len(found) == len(said)
    for text, finding in zip(said, found, strict=True):
        assert text in finding.measured
    assert preflight.check_header(None, HEADER) == []
    assert preflight.check_header(SIZES | changed, {}) == []


def test_the_demos_own_model_does_not_contradict_itself(tmp_path: Path) -> None:
    write(tmp_path, 1, dim=Dimensions(experts=2))
    header = read_header(tmp_path / "tiny-GLM-5-UD-Q4_K_XL.gguf")
    config, _ = read_config(tmp_path)
    keys = {name: entry.integer for name, entry in header.keys.items()}
    assert {f"glm-dsa.{key}" for key in preflight.HEADER_SIZES} <= set(keys)
    assert config is not None
    assert set(preflight.HEADER_SIZES.values()) <= set(config)
    assert preflight.check_header(config, keys) == []


def test_something_to_serve() -> None:
    assert preflight.check_source("/s", True, "/m", None) == []
    assert preflight.check_source("", False, "/m", True) == []
    (unset,) = preflight.check_source("", False, "/m", None)
    assert "is not set" in unset.measured
    (gone,) = preflight.check_source("/s", False, "/m", None)
    assert "/s does not exist, and there is no /m" in gone.measured
    (another,) = preflight.check_source("/s", False, "/m", False)
    assert "/m was not made of its set" in another.measured
    assert "leave it empty" in another.remedy


ACCOUNTS = """root:x:0:0:root:/root:/bin/bash
vllm:x:998:998::/var/lib/vllm-glm5:/usr/sbin/nologin
ubuntu:x:1000:1000:Ubuntu:/home/ubuntu:/bin/bash
bare:x:1001:1001::/home/bare:
toor:x:0:0::/root:/usr/sbin/nologin
"""


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("vllm", []),
        ("not-there", []),
        ("ubuntu", ["user"]),
        ("bare", ["user"]),
        ("toor", ["user"]),
    ],
)
def test_an_account_that_a_person_uses_is_not_taken(user: str, expected: list[str]) -> None:
    assert checks(preflight.check_user(user, ACCOUNTS)) == expected


def test_a_masked_unit_and_a_unit_of_others_are_refused() -> None:
    assert preflight.check_unit("a.service", "not-found", None, ours=False) == []
    assert preflight.check_unit("a.service", "loaded", "# Rendered by gpubox", ours=True) == []
    (masked,) = preflight.check_unit("a.service", "masked", None, ours=False)
    assert masked.remedy == "systemctl unmask a.service"
    (foreign,) = preflight.check_unit("ssh.service", "loaded", "[Unit]", ours=False)
    assert "serving_unit" in foreign.remedy


def test_missing_companions_are_named_once() -> None:
    assert preflight.check_companions([], ["/a"]) == []
    (finding,) = preflight.check_companions(["t.json", "c.json"], ["/a", "/b"])
    assert finding.measured == "no c.json, t.json in /a or /b"


def test_what_the_headers_say_is_an_error() -> None:
    (finding,) = preflight.check_shards([GpuboxError("m", "w", "r")])
    assert (finding.severity, finding.measured, finding.remedy) == ("error", "m", "r")


def test_a_file_where_a_directory_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    found = module.no_directories(tmp_path / "new" / "deep", tmp_path / "file" / "deep")
    assert found == [str(tmp_path / "file")]
    assert module.no_directories(tmp_path / "nowhere") == [str(tmp_path / "nowhere")]
    assert checks(preflight.check_directories(found)) == ["directory"]


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html><html>not found</html>"])
def test_a_source_that_is_no_gguf_is_seen_by_its_header(tmp_path: Path, content: bytes) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(content)
    assert len(module.read_headers(source)[1]) == 1


def test_a_missing_shard_is_seen_before_the_merge(tmp_path: Path) -> None:
    _, faults = module.read_headers(tmp_path / "m-00001-of-00002.gguf")
    assert "m-00002-of-00002.gguf" in " ".join(str(fault) for fault in faults)


def test_the_holder_of_the_port_is_named() -> None:
    (finding,) = preflight.check_port(8000, [(7, "nginx")])
    assert "PID 7 (nginx)" in finding.measured
    assert "serving_port" in finding.remedy


def test_an_unreadable_holder_of_the_port_is_not_called_pid_0() -> None:
    (finding,) = preflight.check_port(8000, [(0, "a process that cannot be read")])
    assert finding.measured == "port 8000 is held by a process that cannot be read"
    assert "ps -fp" not in finding.remedy
    assert "ss -ltnp sport = :8000" in finding.remedy


def test_the_verdict_lists_errors_first_and_passes_with_warnings_only() -> None:
    warning = Finding("warning", "a", "m", "w", "r")
    error = Finding("error", "b", "m", "w", "r")
    both = preflight.verdict([warning, error])
    assert not both["passed"]
    assert [item["check"] for item in both["findings"]] == ["b", "a"]
    assert "measured: m" in both["text"]
    assert preflight.verdict([warning])["passed"]
    assert preflight.verdict([])["text"] == "nothing stands in the way"


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "num_attention_heads",
                "index_topk",
                "max_position_embeddings",
                "num_experts",
                "n_routed_experts",
            ]
        ),
        st.none() | st.integers() | st.text() | st.lists(st.integers()),
    ),
    st.integers(-2, 200),
    st.integers(-2, 10**7),
)
def test_no_config_json_breaks_it(config: dict[str, Any], size: int, length: int) -> None:
    for finding in preflight.check_model(config, "cpu", size, length):
        assert finding.severity == "error"
        assert finding.measured
        assert finding.remedy


def test_our_own_processes_are_those_of_the_unit(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/system.slice/vllm-glm5.service"
    (group / "below").mkdir(parents=True)
    (group / "cgroup.procs").write_text("4711\n4712\n")
    (group / "below/cgroup.procs").write_text("4713\n")
    found = module.processes_of(tmp_path, "/system.slice/vllm-glm5.service")
    assert found == {4711, 4712, 4713}
    assert module.processes_of(tmp_path, "") == set()
    assert module.processes_of(tmp_path, "/system.slice/other.service") == set()
