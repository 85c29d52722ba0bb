# SPDX-License-Identifier: Apache-2.0
"""Values that no role can use are refused, all at once, and those that people use are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gpubox.values import is_secret, value_faults
from gpubox.variables import role_options

ROOT = Path(__file__).resolve().parents[2]
STACKS = ["glm5-cpu", "glm5-cu130"]
DEFAULTS: dict[str, Any] = {
    name: option["default"]
    for options in role_options(ROOT / "roles").values()
    for name, option in options.items()
}
# the one default that is made of another variable
DEFAULTS["python_env_cache_dir"] = "/opt/gpubox/cache/uv"


def test_the_defaults_and_the_example_are_good() -> None:
    example = yaml.safe_load((ROOT / "inventory/example/group_vars/gpubox.yml").read_text())
    assert value_faults(DEFAULTS, STACKS) == []
    assert value_faults({**DEFAULTS, **example}, STACKS) == []


BAD = [
    ("flash_attn_enabled", True),
    ("flash_attn_enabled", "yes"),
    ("serving_port", 0),
    ("serving_port", "70000"),
    ("serving_port", "abc"),
    ("serving_port", 80),
    ("serving_host", ""),
    ("serving_host", "::1"),
    ("serving_unit", "../../x y"),
    ("serving_unit", "vllm-glm5.service"),
    ("serving_unit", ""),
    ("serving_user", "root"),
    ("serving_user", "root; rm"),
    ("serving_model_name", ""),
    ("serving_model_name", "two words"),
    ("serving_model_name", "--help"),
    ("serving_ready_prompt", "two\nlines"),
    ("serving_ready_tokens", 0),
    ("serving_start_timeout", -1),
    ("plan_tensor_parallel_size", -1),
    ("plan_max_model_len", -1),
    ("plan_max_model_len", "131_072"),
    ("plan_max_model_len", " 131072"),
    ("plan_max_model_len", "+131072"),
    ("plan_data_parallel_size", "٤"),
    ("gguf_model_hub_url", "https://mirror.example/?sig=hunter2"),
    ("plan_speculative_tokens", -1),
    ("plan_stack", "../stacks/glm5-cpu"),
    ("plan_stack", ["glm5-cpu"]),
    ("gguf_model_dir", "models"),
    ("gguf_model_dir", ""),
    ("gguf_model_dir", "/srv/$HOME"),
    ("gguf_model_dir", "/srv/a\nb"),
    ("gguf_model_file", "../x.gguf"),
    ("gguf_model_file", "model.bin"),
    ("gguf_model_file", f"{'é' * 100}.gguf"),
    ("gguf_model_companions", ["config.json", "t" * 201]),
    ("gguf_model_dir", "/srv/" + "m" * 201),
    ("gguf_model_dir", "/srv" + "/models" * 500),
    ("gguf_model_dir", "/srv/\ud800"),
    ("gguf_model_source", f"/srv/{'m' * 200}.gguf"),
    ("gguf_model_source", f"https://mirror.example/{'%41' * 200}.gguf"),
    ("gguf_model_files", {"x" * 201: {"size": 1, "sha256": "a" * 64}}),
    ("python_env_root", "/opt/" + "g" * 201),
    ("gguf_model_file", ""),
    ("gguf_model_source", "shards/x.gguf"),
    ("gguf_model_source", "hf://zai-org/GLM-5@main/x.gguf"),
    ("gguf_model_source", "ftp://m.example/x.gguf"),
    ("gguf_model_files", {"../x": {"size": 1, "sha256": "a" * 64}}),
    ("gguf_model_files", {".x": {"size": 1, "sha256": "a" * 64}}),
    ("gguf_model_files", {"x": {"size": -1, "sha256": "a" * 64}}),
    ("gguf_model_files", {"x": {"size": 1, "sha256": "A" * 64}}),
    ("gguf_model_files", {"x": {"size": 1}}),
    ("gguf_model_files", {"x": {"size": 1, "sha256": "a" * 64, "token": "hunter2"}}),
    ("gguf_model_files", {"x": {"size": 1, "sha256": "a" * 64, "source": "/x"}}),
    ("gguf_model_files", {"x": None}),
    ("gguf_model_hub_url", "huggingface"),
    ("gguf_model_token_file", "hf_hunter2"),
    ("gguf_model_companions", ["config.json", "../../etc/shadow"]),
    ("python_env_root", "opt"),
    ("python_env_root", "/"),
    ("python_env_root", "/opt/with blank"),
    ("python_env_root", "/opt/../etc"),
    # joined to a path that `venv --clear` empties
    ("python_env_uv_version", "1/../../../../etc"),
    ("python_env_index_url", "mirror"),
    ("python_env_index_url", "https://me:hunter2@mirror.example/simple"),
    ("python_env_find_links", "wheels"),
    ("python_env_extra_packages", ["-o Foo"]),
    ("verify_max_tokens", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_that_cannot_work_is_refused_in_three_parts(name: str, value: object) -> None:
    (fault,) = value_faults({name: value}, STACKS)
    measured, wanted, remedy = fault.split("\n")
    assert measured.startswith(f"measured: {name} is ")
    assert wanted.startswith("wanted: ")
    assert remedy.startswith("do: set ")
    assert "hunter2" not in fault


GOOD = [
    ("flash_attn_enabled", False),
    ("flash_attn_enabled", "no"),
    ("serving_port", "8001"),
    ("serving_host", "192.0.2.1"),
    ("serving_model_name", "zai-org/GLM-5"),
    ("gguf_model_dir", '/srv/my models/50% "größe" it\'s'),
    ("gguf_model_dir", "/srv/" + "m" * 200),
    ("gguf_model_source", ""),
    ("gguf_model_source", f"hf://zai-org/GLM-5@{'0' * 40}/UD-Q4_K_XL/x.gguf"),
    ("gguf_model_source", "https://mirror.example/glm5/x.gguf"),
    ("gguf_model_files", {"x": {"size": 1, "sha256": "a" * 64, "source": "https://m.example/y"}}),
    ("python_env_root", "/opt/gpubox-2"),
    ("python_env_index_url", "https://mirror.example/simple"),
    ("python_env_find_links", "/srv/wheelhouse"),
    ("python_env_extra_packages", ["numactl", "libnuma1=2.0.16-1"]),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_value_that_works_is_not_refused(name: str, value: object) -> None:
    assert value_faults({name: value}, STACKS) == []


def test_every_fault_is_listed_at_once() -> None:
    assert len(value_faults({"serving_port": 0, "gguf_model_dir": "x"}, STACKS)) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"Max-Len!": 1}, "correct the name"),
        ({"max-model-len": 9}, "plan_max_model_len"),
        ({"tensor-parallel-size": 4}, "set plan_tensor_parallel_size instead"),
        ({"pipeline_parallel_size": 2}, "set plan_pipeline_parallel_size instead"),
        ({"data_parallel_size": 2}, "set plan_data_parallel_size instead"),
        ({"kv-cache-memory-bytes": 9}, "set gpu_memory_utilization instead"),
        ({"config": "/etc/vllm.yml"}, "into serving_options"),
        ({"nnodes": 2}, "cards of one box"),
        ({"enable-expert-parallel": True}, "a part of each expert"),
        ({"tensor-parallel": 2}, "read as tensor_parallel_size"),
        ({"port": 9}, "serving_port"),
        ({"api-key": "hunter2"}, "no secret"),
        ({"seed": "1\n2"}, "one line"),
    ],
)
def test_options_of_the_server_that_cannot_be(options: dict[str, object], named: str) -> None:
    (fault,) = value_faults({"serving_options": options}, STACKS)
    assert named in fault
    assert "hunter2" not in fault


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"NCCL_P2P_LEVEL": "NODE"}, "one of: LOC, NVL, PIX, PXB, PHB, SYS"),
        ({"NCCL_P2P_DISABLE": True}, "one of: 0, 1"),
        ({"VLLM_GGUF_EXPERT_DECODE": 3}, "one of: 0, 1, 2"),
        ({"VLLM_GGUF_EXPERT_DECODE": "off"}, "one of: 0, 1, 2"),
        ({"VLLM_GGUF_PACKED": "yes"}, "one of: 0, 1, 2"),
        ({"A B": "x"}, "correct the name"),
        ({"VLLM_API_KEY": "hunter2"}, "no secret"),
        ({"HF_TOKEN": "hunter2"}, "no secret"),
        ({"GPUBOX_RELEASE": "x"}, "gpubox's own"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "in order of address"),
        ({"VLLM_ENGINE_READY_TIMEOUT_S": "9"}, "set serving_start_timeout instead"),
        ({"A": True}, "in quotes"),
        ({"A": ["x"]}, "in quotes"),
        ({"A": "x\ny"}, "one line"),
    ],
)
def test_variables_of_the_unit_that_cannot_be(variables: dict[str, object], named: str) -> None:
    (fault,) = value_faults({"serving_environment": variables}, STACKS)
    assert named in fault
    assert "hunter2" not in fault


def test_odd_but_good_options_and_variables_pass() -> None:
    odd = '50% $HOME "quoted" {"a": 1} größe'
    options = {"chat_template": odd, "enforce-eager": True}
    assert value_faults({"serving_options": options}, []) == []
    variables = {"NOTE": odd, "OMP_NUM_THREADS": 2, "VLLM_GGUF_EXPERT_DECODE": 0}
    assert value_faults({"serving_environment": variables}, []) == []


def test_an_answer_needs_room_in_the_context() -> None:
    values = {"plan_max_model_len": "32", "verify_max_tokens": 32, "serving_ready_tokens": 8}
    (fault,) = value_faults(values, STACKS)
    assert fault.startswith("measured: verify_max_tokens is 32")


def test_names_that_say_secret() -> None:
    assert all(map(is_secret, ["VLLM_API_KEY", "HF_TOKEN", "api-key", "DB_PASSWORD"]))
    names = ["TOKENIZERS_PARALLELISM", "max_num_batched_tokens", "ssl_keyfile", "OMP_NUM_THREADS"]
    assert not any(map(is_secret, names))


def test_a_secret_in_an_address_is_not_repeated() -> None:
    for source in ("https://u:hunter2@m.example/x.gguf", "https://m.example/x.gguf?sig=hunter2"):
        files = {"x": {"size": 1, "sha256": "a" * 64, "source": source}}
        faults = value_faults({"gguf_model_source": source, "gguf_model_files": files}, STACKS)
        assert len(faults) == 2
        assert not any("hunter2" in fault for fault in faults)
