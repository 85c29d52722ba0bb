#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Facts of the model on the box, from config.json and the headers of the GGUF."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_facts
short_description: Facts of the model, from config.json and GGUF headers
description:
  - Reads headers only, never a weight. The merged file is read when it is there, else the shards.
  - Without a model the facts are null; what is wrong with one is preflight's to say.
options:
  source: {description: Any shard of the set; empty when there is none., type: str, default: ""}
  model: {description: The merged file., type: path, required: true}
attributes:
  check_mode: {support: full, description: Reads only.}
  diff_mode: {support: none, description: Changes nothing.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: The model is known
  model_facts:
    source: /shared/shards/GLM-5-00001-of-00010.gguf
    model: /shared/glm5-gguf/GLM-5.gguf
"""

RETURN = r"""
facts:
  description:
    - Null without a model. Otherwise C(architecture), sizes of config.json, C(quantization_types)
      (bytes of each), C(tensor_bytes), C(weights) (bytes as loaded, divided over tensor parallel
      ranks or replicated), C(row_parallel) (elements of a row and of its block) and C(faults) (a
      config.json that cannot be read).
  type: dict
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.gguf import Header, read_header
from ansible.module_utils.gpubox.gguf_merge import shard_paths
from ansible.module_utils.gpubox.model_facts import model_facts, read_config
from ansible.module_utils.gpubox.walk import is_file


def read_model(source: str, model: Path) -> dict[str, Any] | None:
    """Facts of the merged file or of the set of ``source``, None when there is neither."""
    file = model if is_file(model) else Path(source)
    headers: list[Header] = []
    try:
        headers = [read_header(path) for path in shard_paths(file)] if is_file(file) else []
    except (GpuboxError, OSError):
        headers = []  # a set with a fault has no known sums
    config, fault = read_config(*([Path(source).parent] if source else []), model.parent)
    if config is None and fault is None and not headers:
        return None
    return model_facts(config, headers, [fault.measured] if fault else [])


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "str", "default": ""},
            "model": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    facts = read_model(module.params["source"], Path(module.params["model"]))
    module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
