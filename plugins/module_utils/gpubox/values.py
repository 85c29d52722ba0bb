# SPDX-License-Identifier: Apache-2.0
"""What the roles' variables may hold, beyond their type; every fault at once, before any change."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from urllib.parse import urlsplit

from .mirror import is_remote, name_of, source_fault

# a rule returns what it wants when the value is none of it, else None
Rule = Callable[[object], str | None]

# An option or variable with one of these words in its name holds something nobody else may read.
SECRET_WORDS = frozenset(
    [
        "apikey",
        "credential",
        "credentials",
        "key",
        "keys",
        "passphrase",
        "passwd",
        "password",
        "pwd",
        "secret",
        "secrets",
        "token",
    ]
)
# Bytes. The system takes names of 255 and paths of 4096; unfinished files and notes are named after
# what they are for, with up to 40 bytes more, and folders of ours lie below those of the operator.
MOST_NAME = 200
MOST_PATH = 3000
_SHORT = f"names of at most {MOST_NAME} bytes and a path of at most {MOST_PATH}"
_NO_PLACE = "leave it out: this version has no place for secrets (a proxy can ask for keys)"
# Options of the server that have a variable of their own, which other checks read.
_OWNED = {
    "host": "serving_host",
    "max_model_len": "plan_max_model_len",
    "model": "gguf_model_file",
    "port": "serving_port",
    "served_model_name": "serving_model_name",
    "speculative_config": "plan_speculative_tokens",
    "data_parallel_size": "plan_data_parallel_size",
    "kv_cache_memory_bytes": "gpu_memory_utilization",
    "pipeline_parallel_size": "plan_pipeline_parallel_size",
    "tensor_parallel_size": "plan_tensor_parallel_size",
}
# Options that make another server of it than the one that was planned and checked, and why.
_NOT_PLANNED = {
    "config": "write the options of that file into serving_options, where other checks see them",
    "enable_expert_parallel": "leave it out: the GGUF plugin gives every rank a part of each "
    "expert, and would compute with the wrong ones",
    "num_gpu_blocks_override": "leave it out: the KV cache is as large as the memory allows",
    **dict.fromkeys(
        (
            "data_parallel_address",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_rank",
            "data_parallel_size_local",
            "data_parallel_start_rank",
            "headless",
            "nnodes",
            "node_rank",
            "prefill_context_parallel_size",
        ),
        "leave it out: the plan is for one server on the cards of one box",
    ),
}
# The same of the environment.
_OWNED_VARIABLES = {
    "CUDA_DEVICE_ORDER": "leave it out: the plan takes the cards in order of address",
    "CUDA_VISIBLE_DEVICES": "leave it out: the plan takes the cards in order of address, as many "
    "as plan_tensor_parallel_size and its like say",
    "VLLM_ENGINE_READY_TIMEOUT_S": "set serving_start_timeout instead",
}


# what is read of a variable; NODE is a word of nvidia-smi's topology and none of NCCL's (field
# report V1), with another VLLM_GGUF_EXPERT_DECODE or VLLM_GGUF_PACKED the server does not start
# (patches 0019 and 0023)
_VARIABLE_WORDS = {
    "NCCL_P2P_DISABLE": ("0", "1"),
    "NCCL_P2P_LEVEL": ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS"),
    "VLLM_GGUF_EXPERT_DECODE": ("0", "1", "2"),
    "VLLM_GGUF_PACKED": ("0", "1", "2"),
}


def is_secret(name: str) -> bool:
    """A name that says that its value is a secret (``VLLM_API_KEY``, ``hf-token``)."""
    return not SECRET_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name.lower()))


def _printable(text: str) -> bool:
    """No control character, and nothing that has no bytes in UTF-8 (a lone surrogate)."""
    return not any(
        ord(character) < 32 or ord(character) == 127 or 0xD800 <= ord(character) < 0xE000
        for character in text
    )


def _whole(lowest: int, highest: int | None = None) -> Rule:
    wanted = f"a whole number from {lowest}" + (f" to {highest}" if highest is not None else " up")

    def rule(value: object) -> str | None:
        # int() takes more ("1_000", " 7", other scripts' digits) than those who read the number
        if not re.fullmatch(r"-?[0-9]{1,18}", str(value)):
            return wanted
        number = int(str(value))
        return None if lowest <= number and (highest is None or number <= highest) else wanted

    return rule


def _text(pattern: str, wanted: str) -> Rule:
    return lambda value: None if re.fullmatch(pattern, str(value)) else wanted


def _each(rule: Rule) -> Rule:
    def every(value: object) -> str | None:
        wanted = [rule(item) for item in (value if isinstance(value, list | tuple) else [value])]
        return next((text for text in wanted if text), None)

    return every


def _or_empty(rule: Rule) -> Rule:
    return lambda value: None if value in ("", None) else rule(value)


def _short(text: str) -> bool:
    """Names and path are below the system's limits, those of the files that we put beside too."""
    names = text.encode("utf-8", "replace").split(b"/")
    return max(map(len, names)) <= MOST_NAME and sum(map(len, names)) <= MOST_PATH


def _path(value: object) -> str | None:
    """Ansible expands ``~`` and ``$NAME`` in some places and not in others; so neither is used."""
    text = str(value)
    good = text.startswith("/") and _printable(text) and "$" not in text
    if not good or ".." in text.split("/"):
        return "an absolute path of one line without '..' or '$'"
    return None if _short(text) else _SHORT


def _tool_path(value: object) -> str | None:
    """A path that comes into PATH, PYTHONPATH and the first words of command lines."""
    wanted = "an absolute path of letters, digits, '.', '_', '+' and '-', without '..'"
    if ".." in str(value).split("/") or not re.fullmatch(r"(/[\w.+-]+)+/?", str(value), re.ASCII):
        return wanted
    return None if _short(str(value)) else _SHORT


def _file_name(value: object) -> str | None:
    text = str(value)
    good = text not in ("", ".", "..") and "/" not in text and _printable(text) and "$" not in text
    if not good:
        return "a file name, no path"
    return None if _short(text) else _SHORT


def _gguf_name(value: object) -> str | None:
    if not str(value).endswith(".gguf") or str(value) == ".gguf":
        return "a file name that ends in .gguf, no path"
    return _file_name(value)


def _host(value: object) -> str | None:
    try:
        ipaddress.IPv4Address(str(value))
    except ValueError:
        return None if value == "localhost" else "an IPv4 address such as 127.0.0.1, or localhost"
    return None


def _served_name(value: object) -> str | None:
    text = str(value)
    good = text and _printable(text) and not re.search(r"\s", text) and not text.startswith("-")
    return None if good else "a name without blanks that does not begin with '-'"


def _line(value: object) -> str | None:
    text = str(value)
    return None if text.strip() and _printable(text) else "one line of text that is not empty"


def _index(value: object) -> str | None:
    """An address of packages; it comes into environments and messages, so it holds no password."""
    try:
        parts = urlsplit(str(value))
        good = parts.scheme in ("http", "https", "file") and _printable(str(value))
        if good and parts.username is not None:
            return "a URL without user and password (put those into /root/.netrc of the box)"
        if good and ("?" in str(value) or "#" in str(value)):
            return "a URL without query and fragment (it is printed, and may not hold a secret)"
        good = good and bool(parts.hostname or parts.scheme == "file")
    except ValueError:
        good = False
    return None if good else "a URL (https://…)"


def _index_or_path(value: object) -> str | None:
    if _path(value) is None:
        return None
    wanted = _index(value)
    return wanted and f"{wanted} or an absolute path of the box"


def _model_source(value: object) -> str | None:
    text = str(value)
    if not is_remote(text):
        return _path(value)
    return source_fault(text) or _file_name(name_of(text))


def _model_files(value: object) -> str | None:
    wanted = "name: {size: bytes, sha256: 64 digits}, and source where it lies elsewhere"
    if not isinstance(value, Mapping):
        return wanted
    for name, one in value.items():
        if _file_name(name) is not None or str(name).startswith("."):
            return wanted
        if not isinstance(one, Mapping) or not {"size", "sha256"} <= set(one):
            return wanted
        if set(one) - {"size", "sha256", "source"} or _whole(0)(one["size"]) is not None:
            return wanted
        if not re.fullmatch(r"[0-9a-f]{64}", str(one["sha256"])):
            return wanted
        if "source" in one and source_fault(str(one["source"])):
            return f"{wanted}: {source_fault(str(one['source']))}"
    return None


# people paste a token where its file should be named, or a signed address
_NOT_SHOWN = ("gguf_model_files", "gguf_model_token_file")
_SECONDS = _whole(1, 7 * 24 * 3600)
_RULES: dict[str, Rule] = {
    # the one judgement of it: the role that would build has nothing to do otherwise
    "flash_attn_enabled": _text(
        r"(?i:false|no|off|n|f|0)?", "false: this release of gpubox cannot build flash-attn yet"
    ),
    "gguf_model_companions": _each(_file_name),
    "gguf_model_dir": _path,
    "gguf_model_file": _gguf_name,
    "gguf_model_files": _model_files,
    "gguf_model_hub_url": _index,
    "gguf_model_source": _or_empty(_model_source),
    "gguf_model_token_file": _or_empty(_path),
    "hardware_root": _path,
    "plan_expected_gpus": _whole(0, 64),
    "plan_data_parallel_size": _whole(1),
    "plan_format": _text(r"table|json", "table or json"),
    "plan_max_jobs": _whole(0),
    "plan_max_model_len": _whole(0),
    "plan_pipeline_parallel_size": _whole(0),
    "plan_speculative_tokens": _whole(0, 16),
    "plan_tensor_parallel_size": _whole(0),
    "preflight_report": _or_empty(_path),
    "python_env_ca_bundle": _or_empty(_path),
    "python_env_cache_dir": _path,
    "python_env_extra_packages": _each(
        _text(r"[a-z0-9][a-z0-9.+-]*(=[\w.+:~-]+)?", "names of Debian packages")
    ),
    "python_env_find_links": _or_empty(_index_or_path),
    "python_env_index_url": _or_empty(_index),
    "python_env_python_mirror": _or_empty(_index),
    "python_env_root": _tool_path,
    "python_env_uv_version": _text(r"[0-9]+(\.[0-9]+)*", "a version such as 0.13.9"),
    "serving_host": _host,
    # the service user may not bind ports below
    "serving_port": _whole(1024, 65535),
    "serving_model_name": _served_name,
    "serving_ready_prompt": _line,
    "serving_ready_tokens": _whole(1),
    "serving_restart_seconds": _whole(0, 24 * 3600),
    "serving_start_timeout": _whole(0, 7 * 24 * 3600),
    "serving_stop_timeout": _SECONDS,
    "serving_unit": lambda value: (
        None
        if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", str(value), re.ASCII)
        and not str(value).endswith((".service", ".socket", ".timer"))
        else "a name of letters, digits, '.', '_' and '-', without .service"
    ),
    "serving_user": lambda value: (
        None
        if re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", str(value)) and value != "root"
        else "a user name of small letters, digits, '_' and '-', not root"
    ),
    "verify_max_tokens": _whole(1),
    "verify_prompt": _line,
}


def _option_faults(options: Mapping[object, object]) -> Iterator[tuple[str, str, str]]:
    for name, value in options.items():
        what = f"serving_options has {name!r}"
        key = str(name).replace("-", "_")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            yield what, "names such as max_num_seqs", "correct the name"
        elif key in _OWNED:
            yield what, "that where other checks see it", f"set {_OWNED[key]} instead"
        elif key in _NOT_PLANNED:
            yield what, "the server that was planned", _NOT_PLANNED[key]
        elif begun := [one for one in sorted(_OWNED | _NOT_PLANNED) if one.startswith(key)]:
            # argparse takes the beginning of an option for the option
            yield what, "whole names of options", f"it is read as {begun[0]}: leave it out"
        elif is_secret(key):
            yield what, "no secret on a command line", _NO_PLACE
        elif not _printable(str(value)):
            yield f"{what} with a line break or control character", "one line", "correct the value"


def _environment_faults(variables: Mapping[object, object]) -> Iterator[tuple[str, str, str]]:
    for name, value in variables.items():
        what = f"serving_environment has {name!r}"
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
            yield what, "names of environment variables", "correct the name"
        elif str(name).startswith("GPUBOX_"):
            yield what, "no name of gpubox's own", "leave it out"
        elif name in _OWNED_VARIABLES:
            yield what, "the server that was planned", _OWNED_VARIABLES[str(name)]
        elif str(value) not in _VARIABLE_WORDS.get(str(name), (str(value),)):
            wanted = f"one of: {', '.join(_VARIABLE_WORDS[str(name)])}"
            yield f"{what} with {str(value)!r}", wanted, "correct the value"
        elif is_secret(str(name)):
            yield (
                what,
                "no secret in the unit and the manifest, which everybody on the box can read",
                _NO_PLACE,
            )
        elif isinstance(value, bool) or not isinstance(value, str | int | float):
            kind = "a bool" if isinstance(value, bool) else f"a {type(value).__name__}"
            yield f"{what} with {kind}", "text or a number", "write the text in quotes"
        elif not _printable(str(value)):
            yield f"{what} with a line break or control character", "one line", "correct the value"


def _number(values: Mapping[str, object], name: str) -> int | None:
    try:
        return int(str(values[name]))
    except (KeyError, ValueError):
        return None


def _length_faults(values: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    longest = _number(values, "plan_max_model_len")
    for name in ("serving_ready_tokens", "verify_max_tokens"):
        tokens = _number(values, name)
        if longest is not None and tokens is not None and longest > 0 and tokens >= longest:
            yield (
                f"{name} is {tokens} and plan_max_model_len {longest}",
                "room for the prompt and the answer",
                f"lower {name} or raise plan_max_model_len",
            )


def value_faults(values: Mapping[str, object], stacks: Collection[str]) -> list[str]:
    """One text of three parts for each value that a role could not use.

    Args:
        values: variable name to value, as the inventory and ``-e`` gave them; types are checked
            elsewhere, and a number may come as text (``-e serving_port=8001``).
        stacks: names that ``plan_stack`` may have.
    """
    found: list[tuple[str, str, str]] = []
    for name, rule in sorted(_RULES.items()):
        wanted = rule(values[name]) if name in values else None
        if wanted:
            shown = repr(str(values[name]))
            if name in _NOT_SHOWN or "password" in wanted or "a secret" in wanted:
                shown = "a value that may hold a secret"
            remedy = f"set {name} to such a value, in the inventory or after -e"
            found.append((f"{name} is {shown}", wanted, remedy))
    if "plan_stack" in values and values["plan_stack"] not in stacks:
        found.append(
            (
                f"plan_stack is {str(values['plan_stack'])!r}",
                f"one of: {', '.join(sorted(stacks))}",
                "set plan_stack in the inventory",
            )
        )
    for name, faults in (
        ("serving_options", _option_faults),
        ("serving_environment", _environment_faults),
    ):
        value = values.get(name)
        if isinstance(value, Mapping):
            found += faults(value)
    found += _length_faults(values)
    return [f"measured: {part[0]}\nwanted: {part[1]}\ndo: {part[2]}" for part in found]
