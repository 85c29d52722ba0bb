#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""A virtual environment that holds exactly pinned distributions, made by uv."""

from __future__ import annotations

DOCUMENTATION = r"""
module: uv_environment
short_description: Virtual environment with pinned distributions
description:
  - Makes C(<path>/venv) with uv and installs pinned requirements into it.
  - A stamp is written last. Without it, what a killed run left behind is removed and built again.
  - Each run compares the distributions on disk with the pins, so drift is seen and mended.
options:
  path: {description: Directory of the environment., type: path, required: true}
  uv: {description: Path of the uv executable., type: path, required: true}
  python: {description: Version or path of the interpreter., type: str, required: true}
  requirements:
    description: Exact pins with hashes, the text of a requirements file.
    type: str
    required: true
  only:
    description:
      - Distributions to install, with what they need, all at their pinned versions.
      - Everything pinned when empty.
    type: list
    elements: str
    default: []
  stamp: {description: Name of this step's stamp., type: str, default: environment}
attributes:
  check_mode: {support: full, description: Nothing is written.}
  diff_mode: {support: full, description: The distributions that would change.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: The environment holds every pinned distribution
  uv_environment:
    path: /opt/gpubox/environments/0123456789abcdef
    uv: /opt/gpubox/tools/uv/bin/uv
    python: "3.12"
    requirements: "{{ lookup('ansible.builtin.file', 'requirements.txt') }}"
"""

RETURN = r"""
site_packages:
  description: Directory of the distributions, also when it is not made yet.
  type: str
  returned: always
exists: {description: Whether the environment is there now., type: bool, returned: always}
wrong: {description: Distributions that were not as pinned., type: dict, returned: always}
"""

import json
import shutil
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.environment import difference, installed, pins, select
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.release import digest, write_atomically


def site_packages(venv: Path) -> Path | None:
    """The directory that holds the distributions of a virtual environment."""
    return next(iter(sorted(venv.glob("lib/python3*/site-packages"))), None)


def expected_site_packages(venv: Path, python: str) -> Path:
    """Where the distributions will be (check mode on a bare box)."""
    minor = ".".join(python.split(".")[:2]) if python[:1].isdigit() else "3"
    return venv / "lib" / f"python{minor}" / "site-packages"


def run_uv(module: AnsibleModule, arguments: list[str], wanted: str) -> None:
    """Run uv; its own last lines become the measured state of the error."""
    code, _, error = module.run_command([module.params["uv"], *arguments])
    if code != 0:
        tail = "\n".join(error.strip().splitlines()[-25:])
        raise GpuboxError(
            f"uv {arguments[0]} ended with {code}:\n{tail}",
            wanted,
            "check the python_env_* index and wheelhouse and the network, then run again",
        )


def converge(module: AnsibleModule) -> dict[str, object]:
    """Compare the environment with its pins and mend it."""
    path = Path(module.params["path"])
    venv = path / "venv"
    wanted = pins(module.params["requirements"])
    only = module.params["only"]
    text = select(module.params["requirements"], only) if only else module.params["requirements"]
    if only:
        wanted = {name: wanted[name] for name in pins(text)}
    stamp = path / f"{module.params['stamp']}.json"
    identity = {"python": module.params["python"], "requirements": digest(text)}

    stamped = False
    if stamp.is_file():
        try:
            stamped = json.loads(stamp.read_text(encoding="utf-8")) == identity
        except (OSError, ValueError, RecursionError):
            stamped = False
    packages = site_packages(venv)
    present = installed(packages) if packages else {}
    usable = packages is not None and (venv / "bin" / "python").exists()
    wrong = difference(wanted, present)
    result: dict[str, object] = {
        "changed": bool(wrong) or not stamped or not usable,
        "wrong": wrong,
        "exists": usable,
        "site_packages": str(packages or expected_site_packages(venv, module.params["python"])),
        "diff": {
            "before": "".join(f"{n}: {present[n]}\n" for n in wrong if n in present),
            "after": "".join(f"{name}: {wanted[name]}\n" for name in wrong),
        },
    }
    if not result["changed"] or module.check_mode:
        return result

    stamp.unlink(missing_ok=True)
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not usable:
        shutil.rmtree(venv, ignore_errors=True)
        run_uv(
            module,
            ["venv", "--python", module.params["python"], str(venv)],
            f"an interpreter of Python {module.params['python']}",
        )
        wrong = difference(wanted, {})
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(text)
        requirements.flush()
        if only:
            # a constraint takes no hashes of distributions it does not install; pins suffice here
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
                every = pins(module.params["requirements"])
                constraints.write("".join(f"{n}=={v}\n" for n, v in sorted(every.items())))
                constraints.flush()
                arguments = ["-r", requirements.name, "-c", constraints.name]
                install(module, venv, arguments, wrong)
        else:
            install(module, venv, ["--no-deps", "-r", requirements.name], wrong)
    packages = site_packages(venv)
    left = difference(wanted, installed(packages) if packages else {})
    if left:
        raise GpuboxError(
            "; ".join(f"{name} is {state}" for name, state in left.items()),
            "every distribution as pinned",
            "read the uv output with -vvv; remove the environment's directory and run again",
        )
    write_atomically(stamp, json.dumps(identity, sort_keys=True) + "\n")
    return {**result, "exists": True, "site_packages": str(packages)}


def install(module: AnsibleModule, venv: Path, arguments: list[str], wrong: dict[str, str]) -> None:
    """Install requirements; distributions without a stamp are installed over what is there."""
    again = [] if wrong else ["--reinstall"]
    run_uv(
        module,
        ["pip", "install", "--python", str(venv / "bin" / "python"), *again, *arguments],
        "the pinned distributions",
    )


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "uv": {"type": "path", "required": True},
            "python": {"type": "str", "required": True},
            "requirements": {"type": "str", "required": True},
            "only": {"type": "list", "elements": "str", "default": []},
            "stamp": {"type": "str", "default": "environment"},
        },
        supports_check_mode=True,
    )
    # Environments are patched: a hard link would patch uv's cache too. No configuration of a user.
    module.run_command_environ_update = {
        "UV_LINK_MODE": "copy",
        "UV_NO_CONFIG": "1",
        "UV_NO_PROGRESS": "1",
        # the service user may not write beside the modules: without this each start compiles them
        "UV_COMPILE_BYTECODE": "1",
        "LC_ALL": "C.UTF-8",
    }
    try:
        module.exit_json(**converge(module))
    except GpuboxError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
