# SPDX-License-Identifier: Apache-2.0
"""A stack (a tested set of pins) read with everything it names, and its digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import GpuboxError
from .gguf import QUANTIZATION_TYPES
from .release import digest


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise GpuboxError(
            f"{what} {path} cannot be read ({error.strerror})",
            "a file of the repository",
            "correct the name, or restore the file from git",
        ) from error


def _check_types(stack: Mapping[str, Any], path: Path) -> None:
    known = [known.name for known in QUANTIZATION_TYPES.values()]
    unknown = sorted(set(stack.get("quantization_types") or [""]) - set(known))
    if unknown:
        raise GpuboxError(
            f"{path} has quantization_types {', '.join(map(repr, unknown))}",
            f"some of: {', '.join(known)}",
            "correct the name, or restore the file from git",
        )


def known_stacks(repository: Path) -> list[str]:
    """Names of the stacks of the repository."""
    return sorted(path.stem for path in (repository / "stacks").glob("*.yml"))


def load_stack(name: str, repository: Path) -> dict[str, Any]:
    """Read ``stacks/<name>.yml``, its requirements and its patch series.

    Returns:
        The stack's own keys (among them ``quantization_types``, ggml's names of the tensor types
        that its kernels read), and ``requirements`` (text), ``series`` (in order, each with
        ``name`` and ``definition``), ``patches`` (relative file name to text), ``torch_cuda``
        (CUDA of torch's wheels, None without) and ``digest`` over every byte that was read.

    Raises:
        GpuboxError: a file is missing or malformed.
    """
    stacks = repository / "stacks"
    known = known_stacks(repository)
    if name not in known:
        raise GpuboxError(
            f"plan_stack is {name!r}",
            f"one of: {', '.join(known)}",
            "set plan_stack in the inventory",
        )
    stack: dict[str, Any] = yaml.safe_load(_read(stacks / f"{name}.yml", "the stack"))
    _check_types(stack, stacks / f"{name}.yml")
    requirements = _read(stacks / str(stack["requirements"]), "the requirements file")
    series: list[dict[str, Any]] = []
    contents: dict[str, str] = {}
    for entry in stack["patch_series"]:
        directory = repository / "files" / "patches" / str(entry)
        text = _read(directory / "series.yml", "the patch series")
        definition = yaml.safe_load(text)
        contents[f"{entry}/series.yml"] = text
        for patch in definition["patches"]:
            contents[f"{entry}/{patch['file']}"] = _read(directory / patch["file"], "the patch")
        series.append({"name": entry, "definition": definition})
    return {
        **stack,
        "requirements": requirements,
        "series": series,
        "patches": contents,
        "torch_cuda": torch_cuda(requirements),
        "digest": digest({"stack": stack, "requirements": requirements, "patches": contents}),
    }


def torch_cuda(requirements: str) -> str | None:
    """CUDA version of torch's wheels, from the pin of the runtime that they bring."""
    match = re.search(
        r"^nvidia-cuda-runtime(?:-cu[0-9]+)?==([0-9]+\.[0-9]+)", requirements, re.MULTILINE
    )
    return match[1] if match else None


def texts_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Relative name to text of files of the repository."""
    return {name: _read(folder / name, "the file") for name in names}


def file_digest(path: Path) -> str:
    """sha256 of a file of the repository."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def series_summary(stack: Mapping[str, Any]) -> list[str]:
    """One line a series, for the plan."""
    return [f"{item['name']} ({len(item['definition']['patches'])})" for item in stack["series"]]


def series_at(series: list[Mapping[str, Any]], directory: str) -> list[dict[str, Any]]:
    """The series with the ``path`` that each has on the box, below ``directory``."""
    return [{**item, "path": f"{directory}/{item['name']}"} for item in series]
