#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""A directory of text files that is replaced as a whole."""

from __future__ import annotations

DOCUMENTATION = r"""
module: published_directory
short_description: Directory of text files, switched in with one rename
description:
  - Makes a directory hold the given files. When any of them differs, a complete copy is written
    beside it and renamed into place, so that a killed run never leaves half of a set.
  - Files that are not named are left alone as long as the named ones are right.
options:
  path: {description: The directory., type: path, required: true}
  files: {description: Relative name to text., type: dict, required: true}
  previous:
    description:
      - Directory that this one follows. A file that O(path) does not hold yet is compared with that
        one's in the diff, and left out of it where they are equal.
    type: path
attributes:
  check_mode: {support: full, description: Nothing is written.}
  diff_mode: {support: full, description: The texts that would change.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: The patches lie on the box
  published_directory:
    path: /opt/gpubox/environments/0123456789abcdef/patches
    files: {series.yml: "patches: []\n"}
"""

RETURN = r"""
path: {description: The directory., type: str, returned: always}
"""

from pathlib import Path, PurePosixPath

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.release import publish, read_files


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "previous": {"type": "path"},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    files = {str(name): str(text) for name, text in module.params["files"].items()}
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            module.fail_json(msg=f"measured: file name {name!r}\nwanted: a name below {path}")
    before = read_files(path, files)
    different = sorted(name for name in files if before.get(name) != files[name])
    previous = Path(module.params["previous"] or path)
    shown = read_files(previous, files) | before
    if different and not module.check_mode:
        publish(path, files)
    module.exit_json(
        changed=bool(different),
        path=str(path),
        diff=[
            {
                "before_header": f"{path if name in before else previous}/{name}",
                "after_header": f"{path}/{name}",
                "before": shown.get(name, ""),
                "after": files[name],
            }
            for name in different
            if shown.get(name) != files[name]
        ],
    )


if __name__ == "__main__":
    main()
