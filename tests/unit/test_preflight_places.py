# SPDX-License-Identifier: Apache-2.0
"""Space, mounts and shared memory, from the fact ``paths``."""

from __future__ import annotations

from typing import Any

import pytest
from gpubox.preflight import GIB
from gpubox.preflight_places import (
    check_mounts,
    check_reach,
    check_shared_memory,
    check_space,
    check_walk,
)
from hypothesis import given
from hypothesis import strategies as st

MIB = 1024**2


def place(mount: str, free: int | None, number: str = "259:2", **more: Any) -> dict[str, Any]:
    return {"mount": mount, "number": number, "free_bytes": free, **more}


def test_space_of_one_file_system_is_summed() -> None:
    places = {
        "/opt": place("/", 100 * GIB),
        "/srv/set": place("/", 100 * GIB),
        "/shared/m": place("/shared", 400 * GIB, "9:0"),
    }
    needs = [("environment", "/opt", 16 * GIB), ("shards", "/srv/set", 80 * GIB)]
    assert check_space([*needs[1:], ("merged model", "/shared/m", 396 * GIB)], places) == []
    # a merge keeps up to 4 GiB free, so less would be refused hours later
    (finding,) = check_space([("merged model", "/shared/m", 397 * GIB)], places)
    assert finding.wanted == "401.0 GiB: 397.0 for the merged model (/shared/m), 4.0 in reserve"
    (finding,) = check_space([*needs, ("merged model", "/srv/set", GIB)], places)
    assert finding.measured == "100.0 GiB free on /"
    assert finding.wanted.startswith("101.0 GiB: 16.0 for the environment (/opt), 80.0 for the ")


def test_volumes_of_one_file_system_share_its_space() -> None:
    places = {"/a": place("/", 10 * GIB, "0:28"), "/b": place("/home", 10 * GIB, "0:28")}
    assert len(check_space([("x", "/a", 5 * GIB), ("y", "/b", 5 * GIB)], places)) == 1


def test_unknown_space_is_said_and_nothing_to_write_needs_none() -> None:
    needs = [("x", "/a", GIB), ("y", "/b", 0)]
    for places in ({}, {"/a": place("/", None)}):
        (finding,) = check_space(needs, places)
        assert (finding.severity, finding.measured) == (
            "warning",
            "the free space for /a is unknown",
        )


def test_a_path_that_cannot_be_looked_at_is_told_with_the_reason() -> None:
    assert check_reach({}) == []
    (finding,) = check_reach({"/shared/m": "Permission denied"})
    assert (finding.severity, finding.measured) == ("error", "/shared/m: Permission denied")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=6))
def test_what_fits_alone_and_not_together_is_an_error(sizes: list[tuple[str, int]]) -> None:
    places = {name: place("/", 10 * GIB) for name in "abc"}
    needs = [("x", name, size * GIB) for name, size in sizes]
    total = sum(size for _, size in sizes)
    assert bool(check_space(needs, places)) == (total + 1 > 10)


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        ("runs", {}, None),
        ("runs", {"noexec": True}, "mounted noexec"),
        ("written", {"noexec": True}, None),
        ("written", {"read_only": True}, "mounted read-only"),
        ("runs", {"noexec": True, "read_only": True}, "mounted read-only and noexec"),
    ],
)
def test_mounts(use: str, options: dict[str, bool], said: str | None) -> None:
    found = check_mounts([("/var/cache/x", use)], {"/var/cache/x": place("/var", 1, **options)})
    assert [finding.measured.endswith(said or "") for finding in found] == [True] * bool(said)
    assert check_mounts([("/var/cache/x", use)], {}) == []


@pytest.mark.parametrize(
    ("ranks", "size", "severity"),
    [
        (1, 0, []),
        (2, None, []),
        (2, 64 * MIB, ["error"]),
        (8, 512 * MIB, ["warning"]),
        (8, GIB, []),
    ],
)
def test_shared_memory(ranks: int, size: int | None, severity: list[str]) -> None:
    places = {"/dev/shm": {"mount": "/dev/shm", "size_bytes": size}}  # noqa: S108
    found = check_shared_memory(ranks, places)
    assert [finding.severity for finding in found] == severity
    assert check_shared_memory(ranks, {}) == []


def test_where_the_service_user_is_stopped_is_told() -> None:
    assert check_walk("vllm", {}, {}) == []
    (unasked,) = check_walk("vllm", None, {})
    assert unasked.severity == "warning"
    denied, hidden = check_walk("vllm", {"/root/x/python": "/"}, {"/home/u/m.gguf": "/home"})
    assert denied.measured.startswith("user vllm is stopped at / (mode 0")
    assert denied.measured.endswith("owner 0:0) on the way to /root/x/python")
    assert hidden.measured == "/home/u/m.gguf lies below /home, which the unit hides (ProtectHome)"
