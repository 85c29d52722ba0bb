#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Fetch and verify the files of a model."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_files
short_description: The shards of a model and what lies beside them are on the box and right
description:
  - Fetches what is missing from an HTTP(S) mirror or the model hub, each file held to its size and
    sha256. An interrupted transfer goes on where it stopped; a file has its final name only when it
    is right.
  - Before the shards are fetched their headers are, by ranged requests. A set that does not belong
    together, or whose quantization types the stack does not read, is refused then.
  - The set must be complete, also one that is not fetched but lies on the box.
options:
  shard: {description: Path on the box of any shard of the set., type: path, required: true}
  source:
    description: Address of that shard, empty when it is not fetched.
    type: str
    default: ""
  hub_url: {description: "What hf:// addresses are below.", type: str, default: ""}
  files:
    description: Name to size (bytes), sha256 and, when it is not beside the shard, source.
    type: dict
    default: {}
  quantization_types:
    description: Those that may be in the set.
    type: list
    elements: str
    required: true
  record: {description: File of the notes on what was verified., type: path, required: true}
  merged:
    description: The merger of the set. Once it is made the shards may be gone.
    type: path
  origin:
    description: What M(gguf_merge) was told of a fetched set; a merger of another is none of it.
    type: str
    default: ""
  token_file: {description: File of the box with a token or ?query., type: str, default: ""}
  ca_bundle: {description: Certificates to trust., type: str, default: ""}
  offline: {description: Fetch nothing and name what is missing., type: bool, default: false}
attributes:
  check_mode:
    support: full
    description: Headers are read, also from the source; nothing is written.
  diff_mode: {support: full, description: The files that come.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: The shards are on the box
  model_files:
    shard: /srv/models/sets/0123456789abcdef/GLM-5-00001-of-00002.gguf
    source: https://mirror.example/glm5/GLM-5-00001-of-00002.gguf
    files:
      GLM-5-00001-of-00002.gguf: {size: 7, sha256: "0f…"}
      GLM-5-00002-of-00002.gguf: {size: 9, sha256: "1e…"}
    quantization_types: [F32, Q4_K, Q6_K]
    record: /srv/models/sets/0123456789abcdef.verified.json
"""

RETURN = r"""
fetched: {description: Names of the files that came., type: list, elements: str, returned: always}
identity:
  description: Changes when a shard is another file (size and time of change).
  type: str
  returned: when all shards are there
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox import mirror
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.gguf_merge import (
    combined,
    known_result,
    shard_paths,
)
from ansible.module_utils.gpubox.release import digest

WHOLE = "a complete set, each file with the size and sha256 of gguf_model_files"


def verify(
    files: list[mirror.Wanted], folder: Path, record_path: Path, check_mode: bool
) -> dict[str, GpuboxError]:
    """The fault of each file that is not there or not right, by name."""
    faults = {}
    record = mirror.read_record(record_path)
    for one in files:
        path = folder / one.name
        if mirror.is_verified(one, path, record):
            continue
        fault = mirror.content_fault(one, path)
        if fault is not None:
            faults[one.name] = fault
        elif not check_mode:
            mirror.note(one, path, record_path)
    return faults


def fetch(given: dict[str, Any], missing: list[mirror.Wanted], check_mode: bool) -> None:
    """Bring what is missing, after everything that can be known before was looked at."""
    shard = Path(given["shard"])
    fault = mirror.space_fault(shard.parent, missing)
    if fault is not None:
        raise fault
    transfers = mirror.Mirror(mirror.read_secret(given["token_file"]), given["ca_bundle"])
    by_name = {one.name: one for one in missing}
    urls = {one.name: mirror.url_of(one, given["source"], given["hub_url"]) for one in missing}
    shards = shard_paths(shard)
    if not by_name.keys().isdisjoint(path.name for path in shards):
        faults = mirror.remote_set_faults(
            transfers, urls, shards, by_name, given["quantization_types"]
        )
        if faults:
            raise combined(faults, "a set that this stack serves; nothing was fetched")
    if check_mode:
        return
    shard.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    # the small files first: what is wrong with an address or a token shows at once
    for one in sorted(missing, key=lambda one: (one.size, one.name)):
        path = shard.parent / one.name
        transfers.fetch(urls[one.name], one, path)
        mirror.note(one, path, Path(given["record"]))


def bring(given: dict[str, Any], check_mode: bool) -> list[str]:
    """Names of the files that came, or in check mode would come."""
    shard, record = Path(given["shard"]), Path(given["record"])
    shards = shard_paths(shard)
    names = {path.name for path in shards}
    remote = bool(given["source"])
    merged = Path(given["merged"]) if given["merged"] else None
    if not remote and not any(path.exists() for path in shards):
        if merged is not None and known_result(shards, merged, origin=given["origin"]) is not None:
            return []
        if check_mode:
            return []
    settled = merged is not None and mirror.settled(shards, merged, given["origin"], remote)
    wanted = [one for one in mirror.manifest(given["files"]) if not (settled and one.name in names)]
    faults = verify(wanted, shard.parent, record, check_mode)
    missing = [one for one in wanted if one.name in faults]
    if missing and (not remote or given["offline"]):
        raise combined(list(faults.values()), WHOLE)
    if missing:
        fetch(given, missing, check_mode)
    if not settled and not (check_mode and missing):
        found = mirror.set_faults(shards, given["quantization_types"])
        if found:
            raise combined(found, "a complete set that this stack serves")
    return [one.name for one in missing]


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "shard": {"type": "path", "required": True},
            "source": {"type": "str", "default": ""},
            "hub_url": {"type": "str", "default": ""},
            "files": {"type": "dict", "default": {}},
            "quantization_types": {"type": "list", "elements": "str", "required": True},
            "record": {"type": "path", "required": True},
            "merged": {"type": "path"},
            "origin": {"type": "str", "default": ""},
            # a path, no secret
            "token_file": {"type": "str", "default": "", "no_log": False},
            "ca_bundle": {"type": "str", "default": ""},
            "offline": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)  # the service user reads what comes, whatever root's own mask is
    try:
        names = bring(module.params, module.check_mode)
    except GpuboxError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"measured: {error.filename or module.params['shard']}: {error.strerror}\n"
            "wanted: the files of the model\n"
            "do: repair that and run again: it goes on where it stopped"
        )
    shards = shard_paths(Path(module.params["shard"]))
    folder = shards[0].parent
    answer = {}
    if all(path.is_file() for path in shards):
        states = [path.stat() for path in shards]
        answer["identity"] = digest([[state.st_size, state.st_mtime_ns] for state in states])
    after = "".join(f"{name} {module.params['files'][name]['sha256']}\n" for name in names)
    diff = {"before_header": str(folder), "after_header": str(folder), "before": "", "after": after}
    module.exit_json(changed=bool(names), fetched=names, diff=diff, **answer)


if __name__ == "__main__":
    main()
