# SPDX-License-Identifier: Apache-2.0
from gpubox.errors import GpuboxError


def test_message_has_all_three_parts() -> None:
    error = GpuboxError("port 8000 is held by PID 7", "port 8000 free", "stop PID 7")
    assert str(error) == (
        "measured: port 8000 is held by PID 7\nwanted: port 8000 free\ndo: stop PID 7"
    )
