# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from gpubox import preflight
from gpubox.preflight import GIB, Finding
from hypothesis import given
from hypothesis import strategies as st

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
    ],
)
def test_the_plan_against_config_json(
    config: dict[str, Any] | None, device: str, size: int, length: int, expected: list[str]
) -> None:
    assert checks(preflight.check_model(config, device, size, length)) == expected


def test_space_counts_the_reserve() -> None:
    assert preflight.check_space("x", "/x", 3 * GIB, 4 * GIB) == []
    (finding,) = preflight.check_space("x", "/x", 3 * GIB, 4 * GIB - 1)
    assert "4.0 GiB for the x" in finding.wanted
    assert preflight.check_space("x", "/x", 0, 0) == []


def test_something_to_serve() -> None:
    assert preflight.check_source("/s", True, "/m", False) == []
    assert preflight.check_source("", False, "/m", True) == []
    (unset,) = preflight.check_source("", False, "/m", False)
    assert "is not set" in unset.measured
    (gone,) = preflight.check_source("/s", False, "/m", False)
    assert "/s does not exist" in gone.measured


def test_the_holder_of_the_port_is_named() -> None:
    (finding,) = preflight.check_port(8000, [(7, "nginx")])
    assert "PID 7 (nginx)" in finding.measured
    assert "serving_port" in finding.remedy


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
