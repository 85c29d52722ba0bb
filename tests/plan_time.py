# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.plan_time [BOX]``: seconds of facts, plan and verdict, without Ansible's start.

On this machine, or on a recorded box. The plan is made with the stack for cards where there are
any, without a model.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ansible.module_utils

ROOT = Path(__file__).resolve().parent.parent
ansible.module_utils.__path__.append(str(ROOT / "plugins/module_utils"))
sys.path.insert(0, str(ROOT / "plugins/module_utils"))

from ansible.module_utils.testing import patch_module_args  # noqa: E402 - the path is set above
from gpubox.hardware import Box  # noqa: E402
from gpubox.serving_plan import plan  # noqa: E402
from gpubox.stack import load_stack  # noqa: E402

from tests import boxes  # noqa: E402
from tests.unit.modules import load  # noqa: E402

PATHS = ("/opt/gpubox", "/var/cache/vllm-glm5", "/srv/models/glm5", "/dev/shm")  # noqa: S108
PACKAGES = ("python3-venv", "gcc", "g++", "libc6-dev", "libnuma1", "python3-dev")


def timed(name: str, work: Callable[[], Any]) -> Any:
    """What the work gives; its seconds are printed."""
    begin = time.perf_counter()
    result = work()
    print(f"{name:<8} {time.perf_counter() - begin:6.3f} s")
    return result


def main(names: list[str]) -> None:
    """Time each step once."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path("/")
        if names:
            root, stand_ins = boxes.unpack(names[0], Path(folder), real_behind=True)
            os.environ["PATH"] = f"{stand_ins}:{os.environ['PATH']}"
        begin = time.perf_counter()
        hardware = timed("facts", Box(root, paths=PATHS, packages=PACKAGES).facts)
        device = "cuda" if hardware["nvidia_devices"]["value"] else "cpu"
        stack = load_stack("glm5-cu130" if device == "cuda" else "glm5-cpu", ROOT)
        planned = timed("plan", lambda: plan(hardware, None, stack, {}))
        arguments = {
            "hardware": hardware,
            "device": device,
            "stack": stack["name"],
            "stack_device": stack["device"],
            "environment": "/opt/gpubox/environments/0123456789abcdef",
            "cache": PATHS[1],
            "plan_faults": planned.faults,
            "tensor_parallel_size": planned.tensor_parallel_size,
            "max_model_len": planned.max_model_len or 0,
            "options": stack["serve"]["options"],
            "quantization_types": stack["quantization_types"],
            "model_source": "",
            "model": "/srv/models/glm5/GLM-5.gguf",
            "user": "vllm",
            "unit": "vllm-glm5.service",
            "port": 8000,
            "root": str(root),
        }
        module = load("preflight")

        def judge() -> None:
            with (
                patch_module_args(arguments),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.suppress(SystemExit),
            ):
                module.main()

        timed("verdict", judge)
        print(f"all      {time.perf_counter() - begin:6.3f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
