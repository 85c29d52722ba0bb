# SPDX-License-Identifier: Apache-2.0
"""The interface of the roles is what their files say, in all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from gpubox.variables import role_options, unknown_variables

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
PHASES = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())[0]["roles"]


def _yaml(path: Path) -> dict[str, object]:
    return yaml.safe_load(path.read_text()) or {}


def test_site_names_every_role_once_in_the_order_of_the_design() -> None:
    assert [phase["role"] for phase in PHASES] == [
        "validate",
        "hardware",
        "plan",
        "preflight",
        "nvidia_driver",
        "cuda_toolkits",
        "python_env",
        "flash_attn",
        "vllm",
        "gguf_model",
        "serving",
        "verify",
    ]
    assert sorted(phase["role"] for phase in PHASES) == ROLES


def test_sets_of_shards_are_removed_after_the_server_has_answered() -> None:
    """A start that fails must find the shards of the model that was served before."""
    removing = [
        path for path in ROOT.glob("roles/*/tasks/*.yml") if "model_sets:" in path.read_text()
    ]
    assert removing == [ROOT / "roles" / "gguf_model" / "tasks" / "keep.yml"]
    tasks = yaml.safe_load((ROOT / "roles" / "verify" / "tasks" / "main.yml").read_text())
    names = [task["name"] for task in tasks]
    (keep,) = (
        task for task in tasks
        if task.get("ansible.builtin.include_role", {}).get("tasks_from") == "keep"
    )  # fmt: skip
    assert names.index("One prompt is answered") < names.index(keep["name"])
    assert keep["ansible.builtin.include_role"]["name"] == "gguf_model"
    including = [
        path for path in ROOT.glob("roles/*/tasks/*.yml") if "tasks_from: keep" in path.read_text()
    ]
    assert including == [ROOT / "roles" / "verify" / "tasks" / "main.yml"]


@pytest.mark.parametrize("role", ROLES)
def test_defaults_and_argument_specs_have_the_same_keys_and_values(role: str) -> None:
    defaults = _yaml(ROOT / "roles" / role / "defaults" / "main.yml")
    options = role_options(ROOT / "roles")[role]
    assert sorted(defaults) == sorted(options)
    assert {name: option["default"] for name, option in options.items()} == defaults


@pytest.mark.parametrize("role", ROLES)
def test_public_names_carry_the_prefix_and_private_ones_two_underscores(role: str) -> None:
    defaults = _yaml(ROOT / "roles" / role / "defaults" / "main.yml")
    assert all(name.startswith(f"{role}_") for name in defaults)
    constants = ROOT / "roles" / role / "vars" / "main.yml"
    if constants.exists():
        assert all(name.startswith(f"__{role}_") for name in _yaml(constants))


def test_every_public_variable_is_used_somewhere() -> None:
    texts = "".join(
        path.read_text()
        for folder in ("roles", "templates")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.parent.name not in ("defaults", "meta")
    )
    unused = [
        name
        for options in role_options(ROOT / "roles").values()
        for name in options
        if not re.search(rf"\b{name}\b", texts)
    ]
    assert unused == []


@pytest.mark.parametrize("inventory", ["demo", "example"])
def test_inventories_set_known_variables_only(inventory: str) -> None:
    folder = ROOT / "inventory" / inventory / "group_vars"
    names = [name for path in folder.glob("*.yml") for name in _yaml(path)]
    assert names
    assert unknown_variables(names, role_options(ROOT / "roles")) == []


def test_a_typo_is_named_with_what_was_meant() -> None:
    options = role_options(ROOT / "roles")
    assert unknown_variables(["serving_prot", "serving_port", "unrelated"], options) == [
        "serving_prot is no variable of any role; did you mean serving_port?"
    ]


def test_no_role_uses_a_module_from_outside_the_builtin_ones_and_ours() -> None:
    ours = {path.stem for path in (ROOT / "plugins" / "modules").glob("*.py")}
    keywords = {
        "name", "when", "loop", "loop_control", "register", "vars", "environment", "block",
        "changed_when", "failed_when", "check_mode", "rescue", "always", "no_log", "become",
        "tags", "until", "retries", "delay", "become_user",
    }  # fmt: skip
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")):
        for task in yaml.safe_load(path.read_text()):
            modules = [key for key in task if key not in keywords]
            assert len(modules) == 1, f"{path}: {task['name']}: {modules}"
            assert modules[0] in ours or modules[0].startswith("ansible.builtin."), path
