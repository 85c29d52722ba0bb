# SPDX-License-Identifier: Apache-2.0
"""What a person wants to know at the end, from the report on the box and a look from the host."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from gpubox.errors import GpuboxError

from .engine import Podman

PATH = "/opt/gpubox/current/report.json"


def read(podman: Podman, container: str) -> dict[str, Any]:
    """The report that the verify role wrote on the box.

    Raises:
        GpuboxError: there is none, or it is not JSON.
    """
    outcome = podman.inside(container, "cat", PATH)
    try:
        found: dict[str, Any] = json.loads(outcome.output)
    except ValueError as error:
        raise GpuboxError(
            f"{PATH} in {container} can't be read: {outcome.tail(2) or 'it is no JSON'}",
            "the report that the verify role writes",
            "run `make demo` again",
        ) from error
    return found


def served_models(port: int) -> list[str]:
    """Names of the models that answer on the host's loopback.

    Raises:
        GpuboxError: nothing answers there.
    """
    url = f"http://127.0.0.1:{port}/v1/models"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, never a proxy
    try:
        with opener.open(url, timeout=30) as answer:
            return [str(model["id"]) for model in json.load(answer)["data"]]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        raise GpuboxError(
            f"GET {url} from this host: {error}",
            "the list of served models",
            "see `podman exec gpubox-demo systemctl status gpubox-demo-port.socket vllm-glm5`",
        ) from error


def summary(found: dict[str, Any], container: str, port: int, log: str) -> str:
    """The closing lines of ``make demo``."""
    model = found["model"]
    unit = str(found["unit"]).removesuffix(".service")
    address = f"http://127.0.0.1:{port}/v1"
    body = json.dumps({"model": model, "prompt": found["prompt"], "max_tokens": 16})
    header = "-H 'Content-Type: application/json'"
    first = found["time_to_first_token_seconds"]
    return "\n".join(
        [
            f"address   {address}   (in the box: {found['address']})",
            f"model     {model}   (random weights: the words mean nothing, the numbers are exact)",
            f"prompt    {found['prompt']!r}",
            f"answer    {found['text']!r}",
            f"speed     {found['tokens_per_second']} tokens/s, first token after {first} s",
            f"release   {found['release']}",
            f"ask it    curl -s {address}/completions {header} -d '{body}'",
            f"logs      podman exec {container} journalctl -u {unit} -f     playbook: {log}",
            f"look in   podman exec -it {container} bash",
            f"stop      podman exec {container} systemctl stop {unit}",
            "remove    make demo-down",
        ]
    )
