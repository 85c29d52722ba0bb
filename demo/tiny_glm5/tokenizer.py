# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer of exactly the wanted size, trained here from a fixed text.

Training it with a library would tie the bytes of the model to that library's version and threads.
Special tokens stand behind the ordinary ones, as in GLM-5's own vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
)
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

CHAT_TEMPLATE = (
    "[gMASK]<sop>"
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# Any text with enough different words will do; it only decides which merges exist.
TEXT = """
One playbook turns a bare machine with eight cards into an endpoint that answers many clients.
The driver comes first, then the toolkits, then an environment whose packages are pinned, then the
weights, and at last a service that the init system starts, watches and restarts. Hardware changes:
a card is added, a power supply fails, more memory arrives. The same command is given again and the
plan follows what the machine now has, because every fact is measured and nothing is remembered.
Whoever reads an error should learn what was measured, what was wanted and what to do about it.
A model speaks in tokens. A tokenizer cuts words into pieces, the pieces become numbers, and the
numbers become vectors that attention and experts mix until the next piece is chosen.
Hello world. How are you today? Please write a short answer to this question.
"""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, ordinary ones first, and the merges in order of rank."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]

    def id_of(self, token: str) -> int:
        """Id of ``token``, which must exist."""
        return self.tokens.index(token)

    @property
    def ordinary(self) -> int:
        """How many tokens are no special ones; the ids below this number."""
        return len(self.tokens) - len(SPECIAL_TOKENS)


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes 0 … 255 (GPT-2's table).

    Printable Latin-1 characters stand for themselves, the others are moved to U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    moved = 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + moved))
            moved += 1
    return characters


def train(size: int, text: str = TEXT) -> Vocabulary:
    """Learn a vocabulary of ``size`` tokens; ties are broken by the pair itself.

    Raises:
        ValueError: the text has too few different pairs for so many tokens.
    """
    alphabet = byte_alphabet()
    chunks = re.findall(r" ?\S+|\s+", text)
    words = Counter(tuple(alphabet[byte] for byte in chunk.encode("utf-8")) for chunk in chunks)
    tokens = [*alphabet]
    merges: list[tuple[str, str]] = []
    while len(tokens) < size - len(SPECIAL_TOKENS):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            raise ValueError(f"the text gives only {len(tokens)} ordinary tokens of {size}")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        tokens.append(best[0] + best[1])
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            merged[_merge(word, best)] += count
        words = merged
    return Vocabulary((*tokens, *SPECIAL_TOKENS), tuple(merges))


def padded(vocabulary: Vocabulary, unused: int) -> Vocabulary:
    """The vocabulary with ``unused`` more ordinary tokens, which no merge makes."""
    ordinary = vocabulary.tokens[: vocabulary.ordinary]
    more = tuple(f"unused{number}" for number in range(unused))
    return Vocabulary((*ordinary, *more, *SPECIAL_TOKENS), vocabulary.merges)


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    pieces: list[str] = []
    for piece in word:
        if pieces and (pieces[-1], piece) == pair:
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return tuple(pieces)


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The tokenizer in the format of the ``tokenizers`` library."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    ordinary = vocabulary.tokens[: vocabulary.ordinary]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocabulary.ordinary + index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(ordinary)},
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """tokenizer_config.json; ``context`` in tokens."""
    return {
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": context,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
