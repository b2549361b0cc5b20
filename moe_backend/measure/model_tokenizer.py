# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer built from nothing: no corpus, no download, any vocabulary size.

The vocabulary is the 256 bytes, then every prefix of a list of words, so that each id decodes to
text and any text can be encoded. After the common words below come pronounceable invented ones,
as many as the vocabulary asks for. The merges follow from the words, nothing is trained.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMON_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have
from or had an they which one you were all her she there would their we him been has when who will
no more if out so said what up its about than into them can only other new some could time these
two may then do first any my now such like our over man me even most made after also did many
before must through back years where much your way well down should because each just those people
how too little state good very make world still own see men work long get here between both life
being under never day same another know while last might us great old year off come since against
go came right used take three expert token router model layer weight block scale kernel memory
server request prompt answer write read fast slow large small count number question"""

CONSONANTS = "bcdfghjklmnprstvz"
VOWELS = "aeiou"

# One template for both families: roles become special tokens, ids stay the model's own.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def _words() -> Iterator[str]:
    yield from COMMON_WORDS.split()
    syllables = ["".join(pair) for pair in itertools.product(CONSONANTS, VOWELS)]
    for count in itertools.count(2):
        # A stride that shares no factor with the 85 syllables spreads first letters evenly.
        for number in range(len(syllables) ** count):
            places = [number // len(syllables) ** i for i in range(count)]
            yield "".join(
                syllables[(place * 37 + i) % len(syllables)] for i, place in enumerate(places)
            )


def _grow(vocabulary: dict[str, int], size: int) -> list[tuple[str, str]]:
    """Adds prefixes of words to ``vocabulary`` up to ``size`` tokens; returns the merges."""
    merges: list[tuple[str, str]] = []
    for word in _words():
        for text in (f"Ġ{word}", word):
            for end in range(2, len(text) + 1):
                if len(vocabulary) >= size:
                    return merges
                if text[:end] not in vocabulary:
                    vocabulary[text[:end]] = len(vocabulary)
                    merges.append((text[: end - 1], text[end - 1]))
    return merges


def special_tokens(config: dict[str, Any]) -> dict[str, int]:
    """Names and ids of the special tokens: bos and eos where the model has them, then roles."""
    bos, eos, size = config["bos_token_id"], config["eos_token_id"], config["vocab_size"]
    taken = {bos, eos}
    free = (i for i in itertools.chain(range(eos + 1, size), range(size)) if i not in taken)
    return {"<|begin|>": bos, "<|end|>": eos} | {role: next(free) for role in ROLES}


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template into ``folder``.

    Raises:
        ValueError: the vocabulary is too small for the bytes and the special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = special_tokens(config)
    size = config["vocab_size"]
    if size < 256 + len(special) or max(special.values()) >= size:
        raise ValueError(f"vocab_size: {size} has no room for 256 bytes and the special tokens")
    words = {char: i for i, char in enumerate(_byte_alphabet())}
    merges = _grow(words, size - len(special))
    free = (i for i in range(size) if i not in special.values())
    vocabulary = {text: next(free) for text in words} | special
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ordered = sorted(special, key=special.__getitem__)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ordered])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
