# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from gpubox.errors import GpuboxError

from demo import host

LAPTOP = host.Limits(
    root=False,
    may_raise_limits=False,
    unified_cgroups=True,
    systemd=True,
    nofile=524288,
    nproc=32768,
)
CI = host.Limits(
    root=True,
    may_raise_limits=False,
    unified_cgroups=False,
    systemd=False,
    nofile=20000,
    nproc=32768,
)
# two lines as the kernel prints them: port 18000 (0x4650) listening, port 22 connected
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:4650 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 48211 1
   1: 0A00020F:0016 0A000202:D3F2 01 00000000:00000000 02:000A3B4F 00000000     0        0 19877 4
"""


def test_an_ordinary_machine_needs_no_configuration() -> None:
    assert host.containers_conf(LAPTOP) == ""
    assert host.containers_conf(replace(LAPTOP, root=True, may_raise_limits=True)) == ""


def test_a_machine_without_the_capability_gets_its_own_limits() -> None:
    text = host.containers_conf(CI)
    assert text == (
        "[containers]\n"
        'default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]\n'
        "pids_limit = 0\n"
        "[engine]\n"
        'runtime = "runc"\n'
        'cgroup_manager = "cgroupfs"\n'
        'events_logger = "file"\n'
    )


def test_each_setting_has_its_own_reason() -> None:
    unified = host.containers_conf(replace(CI, unified_cgroups=True, systemd=True))
    assert unified.startswith("[containers]\ndefault_ulimits")
    assert "[engine]" not in unified
    older = host.containers_conf(replace(CI, may_raise_limits=True, systemd=True))
    assert older == '[containers]\npids_limit = 0\n[engine]\nruntime = "runc"\n'


def test_capability_bits_are_read_from_the_effective_set() -> None:
    without = "CapPrm:\t000001ffffffffff\nCapEff:\t000001fffeffffff\n"
    assert not host.has_capability(without, 24)
    assert host.has_capability(without, 21)
    assert host.has_capability(without.replace("fffeff", "ffffff"), 24)


def test_listeners_are_told_from_connections() -> None:
    assert host.listening_inodes(TCP, 18000) == {"48211"}
    assert host.listening_inodes(TCP, 22) == set()


def test_the_holder_of_a_port_is_named(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(TCP)
    descriptors = tmp_path / "812/fd"
    descriptors.mkdir(parents=True)
    (descriptors / "6").symlink_to("socket:[48211]")
    (tmp_path / "812/comm").write_text("nginx\n")
    assert host.holder(18000, tmp_path) == "nginx (PID 812)"
    assert host.holder(18001, tmp_path) == "another program"


@pytest.fixture
def listener() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def test_a_port_in_use_is_an_error_that_names_the_way_out(listener: socket.socket) -> None:
    with listener:
        port = listener.getsockname()[1]
        with pytest.raises(GpuboxError) as caught:
            host.require_free_port(port)
        assert str(port) in caught.value.measured
        assert f"PID {os.getpid()}" in caught.value.measured
        assert "GPUBOX_DEMO_PORT" in caught.value.remedy
    host.require_free_port(port)
