# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from gpubox.errors import GpuboxError
from gpubox.serving import serve_arguments


def test_layers_override_and_order_is_fixed() -> None:
    first = serve_arguments("/m.gguf", {"port": 1, "dtype": "float32"}, {"port": 2})
    second = serve_arguments("/m.gguf", {"dtype": "float32"}, {"port": 2})
    assert first == second == ["/m.gguf", "--dtype", "float32", "--port", "2"]


def test_values_become_what_vllm_reads() -> None:
    options = {
        "enforce_eager": True,
        "enable_log_requests": False,
        "speculative_config": {"num_speculative_tokens": 2, "method": "mtp"},
        "max-model-len": 2048,
        "quantization": None,
    }
    assert serve_arguments("m", options) == [
        "m",
        "--enforce-eager",
        "--max-model-len",
        "2048",
        "--speculative-config",
        '{"method":"mtp","num_speculative_tokens":2}',
    ]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("numa_bind_nodes", [0, 0, 1, 1], ["0", "0", "1", "1"]),
        (
            "lora_modules",
            [{"path": "/a", "name": "b"}, "c=/d"],
            ['{"name":"b","path":"/a"}', "c=/d"],
        ),
        ("numa_bind_nodes", [], None),
        ("allowed-origins", ["https://a", "b"], ['["https://a","b"]']),
        (
            "compilation_config",
            {"cudagraph_capture_sizes": [1, 2]},
            ['{"cudagraph_capture_sizes":[1,2]}'],
        ),
    ],
)
def test_lists_are_words_but_where_vllm_reads_json(
    name: str, value: object, words: list[str] | None
) -> None:
    flag = "--" + name.replace("_", "-")
    assert serve_arguments("m", {name: value}) == ["m", *([flag, *words] if words else [])]


def test_a_flag_that_is_repeated() -> None:
    assert serve_arguments("m", {"middleware": ["a", "b"]}) == [
        "m",
        "--middleware",
        "a",
        "--middleware",
        "b",
    ]


def test_none_takes_an_option_of_a_lower_layer_away() -> None:
    assert serve_arguments("m", {"dtype": "float32"}, {"dtype": None}) == ["m"]


@pytest.mark.parametrize("name", ["--port", "Port", "a b", ""])
def test_a_name_that_is_no_option_is_refused(name: str) -> None:
    with pytest.raises(GpuboxError, match="option"):
        serve_arguments("m", {name: 1})
