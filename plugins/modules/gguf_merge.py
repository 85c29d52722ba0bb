#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Merge GGUF shards into one file."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gguf_merge
short_description: A set of GGUF shards is merged into one file
description:
  - Merges the shards of a model into one GGUF file, byte for byte what C(llama-gguf-split --merge)
    writes, without its silent faults.
  - Every shard is checked before anything is written, and all faults are reported at once. Missing,
    truncated, empty, zero-filled and concatenated files, HTML pages and Git LFS pointers,
    swapped, renumbered or foreign shards, duplicate tensors, too little space.
  - The result is written under a temporary name in the folder of O(dest), brought to the disk and
    renamed. An interrupted run leaves O(dest) as it was; the next one goes on from the last entry
    of a journal (one a GiB), after it has read again what is there, or starts over.
  - A manifest C(<dest>.manifest.json) lets a rerun know the result again in milliseconds, also
    after the shards were deleted, and holds the digests of the file (XXH3 with 128 bits as
    C(xxh128sum) prints it, or BLAKE2b where the box lacks libxxhash) and of each shard's data in
    it. A right file without a manifest is compared and adopted.
  - A file that was never split is copied as it is, unless O(src) and O(dest) are the same file.
  - The shards are never written to, unless O(method=in_place).
options:
  src:
    description: Any shard of the set (C(PREFIX-NNNNN-of-NNNNN.gguf)), or a GGUF file of its own.
    type: path
    required: true
  dest:
    description:
      - The merged file. It must be none of the inputs and not be named like a shard; its folder
        must exist. A symbolic link is followed. An existing file is replaced when it differs and
        hands on its mode and owner.
    type: path
    required: true
  method:
    description:
      - V(copy) reads and writes every byte.
      - V(in_place) takes the content away from the shards as it is copied and removes them at the
        end, so that 1 GiB of space is enough besides them. Once begun it must be finished; until
        then neither the shards nor O(dest) are of use. Needs ext4, XFS or btrfs.
      - V(reflink) shares the shards' blocks (XFS, btrfs), which takes a second. The result has gaps
        between the shards' data. gguf-py and vLLM read it, llama.cpp does not.
    type: str
    choices: [copy, in_place, reflink]
    default: copy
  verify:
    description:
      - The result is read again from the disk before it gets its name, and held to the digests that
        were taken while it was copied. A result of an earlier run is read too, and made again when
        it is damaged and the shards are there.
    type: bool
    default: false
  sha256:
    description:
      - SHA-256 of every shard by file name, from the model's publisher; other names do not matter.
        Every shard is read and held to it before anything is written. Only this tells a shard of
        another revision with the same counts.
    type: dict
    default: {}
  origin:
    description:
      - What the shards are, for example a digest of their publisher's list. The manifest keeps it,
        so that the result of another revision, whose shards have the same names, is not taken for
        this one when the shards are gone.
    type: str
    default: ""
  progress_file:
    description:
      - File on the box that holds a line with bytes, rate and time left while the merge runs. The
        action plugin of this name reads it and shows the line during merges from 8 GiB on.
    type: path
extends_documentation_fragment: [ansible.builtin.files]
attributes:
  check_mode:
    support: full
    description:
      - All checks are made and nothing is written. If none of the shards is there yet, RV(action)
        is C(awaited).
  diff_mode: {support: full, description: Size and tensors of the file before and after.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: GLM-5 is one file
  gguf_merge:
    src: /shared/staging/GLM-5-UD-Q4_K_XL-00001-of-00010.gguf
    dest: /shared/glm5-gguf/GLM-5-UD-Q4_K_XL.gguf
    owner: root
    group: vllm
    mode: "0640"
"""

RETURN = r"""
action:
  description:
    - C(merged) or C(copied) (written), C(adopted) (right already, now with a manifest),
      C(unchanged), or C(awaited) (check mode, the shards are not there yet).
  type: str
  returned: success
path: {description: The result; O(dest) with symbolic links resolved., type: str, returned: success}
sources: {description: The files of the set in order., type: list, elements: str, returned: success}
size: {description: Bytes of the result., type: int, returned: unless awaited}
tensors: {description: Tensors in the result., type: int, returned: unless awaited}
digest:
  description: ALGORITHM:DIGEST of the result; absent where blocks were shared without O(verify).
  type: str
  returned: when the result is there
space:
  description: Bytes C(needed), kept as C(reserve) and found C(free).
  type: dict
  returned: when something is written
resumed: {description: Bytes that an interrupted run had done., type: int, returned: success}
identity:
  description:
    - Changes when the result is another file (size and time of change); a server that was started
      with another identity serves another model. Absent in check mode when it would change.
  type: str
  returned: when the result is there
seconds: {description: Time taken., type: float, returned: success}
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.gguf import read_header
from ansible.module_utils.gpubox.gguf_merge import Method, Options, Result, merge
from ansible.module_utils.gpubox.gguf_merge.progress import Rate


class Line:
    """Keeps one line of progress in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rate = Rate()
        self._written = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Write it anew, at most once a second."""
        line = self._rate.line(what, done, total)
        if time.monotonic() - self._written >= 1 or done >= total:
            self._written = time.monotonic()
            self._path.write_text(line + "\n", encoding="utf-8")


def describe(path: Path) -> str:
    """What ``path`` is, for a diff."""
    if not path.exists():
        return "absent\n"
    try:
        header = read_header(path)
    except GpuboxError as error:
        return f"no GGUF: {error.measured}\n"
    return f"size: {header.size}\ntensors: {len(header.tensors)}\n"


def difference(before: str, result: Result) -> dict[str, str]:
    """The diff of one run."""
    after = before
    if result.action in ("merged", "copied"):
        names = "".join(f"  - {path.name}\n" for path in result.sources)
        after = f"size: {result.size}\ntensors: {result.tensors}\n{result.action} from:\n{names}"
    return {
        "before_header": str(result.path),
        "after_header": str(result.path),
        "before": before,
        "after": after,
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "src": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "method": {"type": "str", "choices": [*Method], "default": str(Method.COPY)},
            "verify": {"type": "bool", "default": False},
            "sha256": {"type": "dict", "default": {}},
            "origin": {"type": "str", "default": ""},
            "progress_file": {"type": "path"},
        },
        add_file_common_args=True,
        supports_check_mode=True,
    )
    dest = Path(module.params["dest"])
    file = module.params["progress_file"] and Path(module.params["progress_file"])
    try:
        before = describe(dest)
        options = Options(
            Method(module.params["method"]),
            module.params["verify"],
            module.params["sha256"],
            module.params["origin"],
            progress=Line(file) if file and not module.check_mode else None,
        )
        result = merge(Path(module.params["src"]), dest, module.check_mode, options)
    except GpuboxError as error:
        module.fail_json(msg=str(error))
    finally:
        if file and not module.check_mode:
            file.unlink(missing_ok=True)
    answer: dict[str, Any] = {
        "action": result.action,
        "path": str(result.path),
        "sources": [str(path) for path in result.sources],
        "seconds": round(result.seconds, 3),
        "resumed": result.resumed,
        "diff": difference(before, result),
    }
    if result.size is not None:
        answer |= {"size": result.size, "tensors": result.tensors}
    if result.digest is not None:
        answer["digest"] = result.digest
    if result.space is not None:
        answer["space"] = asdict(result.space)
    changed = result.changed
    if result.path.exists() and not (module.check_mode and changed):
        found = result.path.stat()
        answer["identity"] = f"{found.st_size}-{found.st_mtime_ns}"
    if result.path.exists():  # in check mode it may still have to come
        attributes = module.load_file_common_arguments(module.params, path=str(result.path))
        changed = module.set_fs_attributes_if_different(attributes, changed)
    module.exit_json(changed=changed, **answer)


if __name__ == "__main__":
    main()
