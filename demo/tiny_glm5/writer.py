# SPDX-License-Identifier: Apache-2.0
"""Writes the set of files into a directory, so that it holds whole files after any crash."""

from __future__ import annotations

import filecmp
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, Keys, TokenType
from numpy.typing import NDArray

from . import tokenizer
from .kquants import quantize
from .model import (
    ARCHITECTURE,
    FILE_STEM,
    Dimensions,
    TensorSpec,
    add_metadata,
    configuration,
    tensors,
)
from .weights import draw

_STAGING_PREFIX = ".tiny-glm5."
_SHARD_NAME = re.compile(re.escape(FILE_STEM) + r"-\d{5}-of-\d{5}\.gguf")


class _ShardWriter(GGUFWriter):  # type: ignore[misc] # gguf has no type information
    """Orders the split keys as ``llama-gguf-split`` does: it sets split.count last of all."""

    def add_shard_kv_data(self) -> None:
        super().add_shard_kv_data()
        for keys in self.kv_data:
            if Keys.Split.LLM_KV_SPLIT_COUNT in keys:
                count = keys.pop(Keys.Split.LLM_KV_SPLIT_COUNT)
                keys[Keys.Split.LLM_KV_SPLIT_COUNT] = count


def write(
    directory: Path,
    shards: int = 3,
    seed: int = 0,
    metadata_shard: bool = False,
    dim: Dimensions | None = None,
    quantization_type: GGMLQuantizationType | None = None,
    distinct: int | None = None,
    alike: bool = False,
) -> list[Path]:
    """Make ``directory`` hold the model of ``seed`` in ``shards`` shards and what goes beside it.

    Files that already have the wanted content are not touched; shards of another division of this
    same model are removed, since a loader would find two sets.

    Args:
        directory: created when missing.
        shards: number of GGUF files.
        seed: of the random weights.
        metadata_shard: let the first shard hold no tensor, as large real sets have it.
        dim: sizes, for tests.
        quantization_type: instead of the mix of types; see ``model.tensors``.
        distinct: weights of a tensor that are drawn before its rows repeat; all if None. For sizes
            that would take hours to draw.
        alike: give the tensors with more weights than ``distinct`` the same ones in every layer, so
            that one layer is drawn and held in memory.

    Returns:
        The files that were written or removed; empty when everything was there.

    Raises:
        ValueError: the tensors cannot be divided into so many shards.
    """
    dim = dim or Dimensions()
    directory.mkdir(parents=True, exist_ok=True)
    changed = []
    with _staging(directory) as staging:
        trained = tokenizer.train(dim.vocabulary - dim.unused_tokens)
        vocabulary = tokenizer.padded(trained, dim.unused_tokens)
        _write_companions(staging, dim, vocabulary)
        known: dict[Any, NDArray[Any]] | None = {} if alike else None
        contents = [
            (spec, partial(_encoded, spec, seed, distinct, known))
            for spec in tensors(dim, quantization_type)
        ]
        _write_shards(staging, dim, vocabulary, contents, shards, metadata_shard)
        staged = sorted(staging.iterdir())
        names = {path.name for path in staged}
        for old in sorted(directory.iterdir()):
            if _SHARD_NAME.fullmatch(old.name) and old.name not in names:
                old.unlink()
                changed.append(old)
        for path in staged:
            target = directory / path.name
            if target.is_file() and filecmp.cmp(path, target, shallow=False):
                continue
            path.chmod(0o644)
            path.replace(target)
            changed.append(target)
    return changed


@contextmanager
def _staging(directory: Path) -> Iterator[Path]:
    """A directory inside ``directory``, gone afterwards; those of killed runs are removed."""
    for leftover in directory.glob(f"{_STAGING_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=directory))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _encoded(
    spec: TensorSpec, seed: int, distinct: int | None, known: dict[Any, NDArray[Any]] | None
) -> NDArray[Any]:
    """The quantised weights of one tensor; its rows repeat after ``distinct`` weights.

    With ``known``, a tensor whose rows repeat has those of the one like it in another layer.
    """
    *outer, width = spec.shape
    rows, drawn = math.prod(outer), (distinct or 0) // width
    if not 0 < drawn < rows:
        return quantize(draw(seed, spec), spec.quantization_type)
    like = (spec.name.split(".", 2)[-1], spec.shape, spec.quantization_type)
    if known is not None and like in known:
        return known[like]
    part = quantize(draw(seed, spec, (drawn, width)), spec.quantization_type)
    whole = part[np.arange(rows) % drawn].reshape(*outer, -1)
    if known is not None:
        known[like] = whole
    return whole


def _write_companions(directory: Path, dim: Dimensions, vocabulary: tokenizer.Vocabulary) -> None:
    eos_ids = [vocabulary.id_of(token) for token in tokenizer.END_TOKENS]
    pad_id = eos_ids[0]
    documents = {
        "config.json": configuration(dim, eos_ids, pad_id),
        "generation_config.json": {"eos_token_id": eos_ids, "pad_token_id": pad_id},
        "tokenizer.json": tokenizer.tokenizer_json(vocabulary),
        "tokenizer_config.json": tokenizer.tokenizer_config(dim.context),
    }
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


def _write_shards(
    directory: Path,
    dim: Dimensions,
    vocabulary: tokenizer.Vocabulary,
    contents: Sequence[tuple[TensorSpec, Callable[[], NDArray[Any]]]],
    shards: int,
    metadata_shard: bool,
) -> None:
    """Shards as ``llama-gguf-split --split --split-max-tensors`` divides and labels them."""
    with_tensors = shards - 1 if metadata_shard else shards
    if with_tensors < 1:
        raise ValueError(f"{shards} shards leave none for the {len(contents)} tensors")
    per_shard = -(-len(contents) // with_tensors)
    if shards > 1 and -(-len(contents) // per_shard) != with_tensors:
        raise ValueError(
            f"{len(contents)} tensors, at most {per_shard} in each file, do not make "
            f"{with_tensors} files with tensors; choose another number of shards"
        )
    writer = _ShardWriter(
        directory / f"{FILE_STEM}.gguf",
        ARCHITECTURE,
        split_max_tensors=per_shard if shards > 1 else 0,
        small_first_shard=metadata_shard,
    )
    add_metadata(writer, dim)
    special = len(vocabulary.tokens) - vocabulary.ordinary
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("glm4")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([TokenType.NORMAL] * vocabulary.ordinary + [TokenType.CONTROL] * special)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary.merges])
    writer.add_eos_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_eot_token_id(vocabulary.id_of("<|user|>"))
    writer.add_pad_token_id(vocabulary.id_of("<|endoftext|>"))
    writer.add_chat_template(tokenizer.CHAT_TEMPLATE)
    for spec, content in contents:
        writer.add_tensor(spec.name, content(), raw_dtype=spec.quantization_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
