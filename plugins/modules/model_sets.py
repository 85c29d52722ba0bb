#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Remove the fetched shards that a policy does not keep."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_sets
short_description: Of the fetched sets of shards only those that the policy keeps are there
description:
  - Removes what M(model_files) fetched and nothing else.
options:
  sets: {description: Folder of the fetched sets., type: path, required: true}
  shard: {description: A shard of the set in use., type: path, required: true}
  merged: {description: The merger of the set in use., type: path}
  keep:
    description: All sets, the one in use, or not even its shards once they are merged.
    type: str
    choices: [all, current, none]
    default: all
attributes:
  check_mode: {support: full, description: Nothing is removed.}
  diff_mode: {support: full, description: What is removed.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: Older sets are gone
  model_sets:
    sets: /srv/models/sets
    shard: /srv/models/sets/0123456789abcdef/GLM-5-00001-of-00002.gguf
    keep: current
"""

RETURN = r"""
removed: {description: Paths., type: list, elements: str, returned: always}
"""

import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox import mirror
from ansible.module_utils.gpubox.errors import GpuboxError


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "sets": {"type": "path", "required": True},
            "shard": {"type": "path", "required": True},
            "merged": {"type": "path"},
            "keep": {"type": "str", "choices": ["all", "current", "none"], "default": "all"},
        },
        supports_check_mode=True,
    )
    given = module.params
    merged = Path(given["merged"]) if given["merged"] else None
    paths: list[Path] = []
    try:
        paths = mirror.surplus(Path(given["sets"]), Path(given["shard"]), given["keep"], merged)
        if not module.check_mode:
            for path in paths:
                # a link into another disk is taken away, what it leads to is not ours
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    except GpuboxError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"measured: {error.filename}: {error.strerror}\n"
            f"wanted: only what gguf_model_keep_sets {given['keep']} keeps\n"
            "do: repair that and run again"
        )
    before = "".join(f"{path}\n" for path in paths)
    header = given["sets"]
    module.exit_json(
        changed=bool(paths),
        removed=[str(path) for path in paths],
        diff={"before_header": header, "after_header": header, "before": before, "after": ""},
    )


if __name__ == "__main__":
    main()
