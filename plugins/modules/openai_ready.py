#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""A unit's own process has completed a prompt."""

from __future__ import annotations

DOCUMENTATION = r"""
module: openai_ready
short_description: Wait for a real completion from a unit's own process
description:
  - Waits until the unit runs, the listener of the port belongs to the unit's control group, and a
    streamed completion by the model's name has brought text. An open port is no proof.
  - Ends at once, with the first error and the last lines of the unit's journal, when the unit has
    failed or was restarted, when another process holds the port, or when the answer is one that
    another try will not change (wrong model name, wrong key, not a model server).
options:
  unit: {description: Name of the unit with its suffix., type: str, required: true}
  base_url:
    description: Address of the server on the box, with or without C(/v1). Plain HTTP.
    type: str
    required: true
  model: {description: Model name to ask for., type: str, required: true}
  deadline:
    description: Longest time for everything, in seconds.
    type: float
    default: 600
  prompt: {description: Prompt to complete., type: str, default: Hello}
  max_tokens: {description: Most tokens to complete., type: int, default: 16}
  api_key:
    description: Key of the server. Goes into a request header only.
    type: str
  root: {description: Directory that holds C(proc)., type: path, default: /}
attributes:
  check_mode:
    support: full
    description:
      - A probe changes nothing, so a running unit is asked once, for at most 60 seconds.
      - What stands in the way is returned as C(awaited) and warned of, because the tasks before
        this one have not changed anything.
  diff_mode: {support: none, description: Nothing is changed.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: The unit's own process has answered
  openai_ready:
    unit: vllm-glm5.service
    base_url: http://127.0.0.1:8000
    model: glm-5
    deadline: 1800
"""

RETURN = r"""
ready: {description: Whether the completion came., type: bool, returned: always}
awaited: {description: What stands in the way (check mode)., type: str, returned: not ready}
main_pid: {description: Main process of the unit., type: int, returned: ready}
seconds:
  description: Time from the call to the end of the completion.
  type: float
  returned: ready
text: {description: The completion., type: str, returned: ready}
prompt_tokens: {description: Tokens of the prompt., type: int, returned: ready}
completion_tokens: {description: Tokens of the completion., type: int, returned: ready}
tokens_per_second:
  description:
    - Tokens after the first by the time after the first.
    - With one token, by the time of the whole request.
  type: float
  returned: ready
time_to_first_token_seconds:
  description: Time from sending the request to the first text.
  type: float
  returned: ready
drafts:
  description:
    - Tokens that a server with speculative decoding has drafted and accepted since it started, for
      all its clients.
    - C(by_position) are the accepted ones by their place in a draft; C(acceptance_rate) is between
      0 and 1, and null before the first draft.
  type: dict
  returned: ready, and the server counts drafts
  sample: {drafted: 64, accepted: 40, by_position: [26, 14], acceptance_rate: 0.625}
"""

import time
from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.readiness import (
    METRICS_SECONDS,
    Endpoint,
    Question,
    Ready,
    Systemd,
    drafts,
    wait_until_ready,
)

CHECK_MODE_SECONDS = 60.0


def ask(module: AnsibleModule) -> Ready:
    """Wait for the completion."""
    given = module.params
    for name in ("deadline", "max_tokens"):
        if given[name] <= 0:
            raise GpuboxError(f"{name} {given[name]}", f"{name} above 0", "correct it")
    system = Systemd()
    deadline = given["deadline"]
    if module.check_mode:
        # nothing was started before this task, so what is not active will not become it
        state = system.unit_state(given["unit"])
        deadline = min(deadline, CHECK_MODE_SECONDS)
        if state.active_state != "active":
            raise GpuboxError(
                f"{given['unit']} is {state.active_state or 'unknown to systemd'}",
                f"a completion by {given['model']} within {given['deadline']:g} s",
                "run without check mode",
            )
    return wait_until_ready(
        given["unit"],
        Endpoint.parse(given["base_url"]),
        Question(given["model"], given["prompt"], given["max_tokens"], given["api_key"]),
        deadline,
        Path(given["root"]),
        system,
    )


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "base_url": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "deadline": {"type": "float", "default": 600},
            "prompt": {"type": "str", "default": "Hello"},
            "max_tokens": {"type": "int", "default": 16},
            "api_key": {"type": "str", "no_log": True},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    try:
        ready = ask(module)
    except GpuboxError as error:
        if not module.check_mode:
            module.fail_json(msg=str(error))
        module.warn(f"not ready now: {error.measured}")
        module.exit_json(changed=False, ready=False, awaited=str(error))
    completion = ready.completion
    counted = drafts(Endpoint.parse(module.params["base_url"]), time.monotonic() + METRICS_SECONDS)
    told = {}
    if counted is not None:
        rate = counted.acceptance_rate
        told["drafts"] = {
            **asdict(counted),
            "acceptance_rate": None if rate is None else round(rate, 3),
        }
    module.exit_json(
        changed=False,
        ready=True,
        main_pid=ready.state.main_pid,
        seconds=round(ready.seconds, 3),
        text=completion.text,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        tokens_per_second=round(completion.tokens_per_second, 3),
        time_to_first_token_seconds=round(completion.time_to_first_token_seconds, 3),
        **told,
    )


if __name__ == "__main__":
    main()
