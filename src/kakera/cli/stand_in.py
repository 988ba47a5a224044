"""A model directory without weights: a config that says they are random, and a stand-in tokenizer and chat template.

The tokenizer is the bundled one, cut or filled up to the size that the config wants. Filled up it reads prose at the
bundled one's density (about four characters a token), and the further ids, which a random model says most of the time,
are made-up words of their own: what the model says reads back as the tokens it said.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kakera.arch.registry import spec_of
from kakera.errors import UsageError
from kakera.plan.weights import RANDOM_WEIGHTS

BYTES = 256  # tokens without which not every text can be written
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def directory_for(name: str, config: dict[str, Any], bundled: Path, seed: int = 0) -> Path:
    """Where the model `name` of this config lies, written if it is not there yet. Raises UsageError.

    `bundled`: directory of the tokenizer and the template that are taken as a pattern.
    """
    content = {"config": config, "seed": seed, "tokenizer": (bundled / "tokenizer.json").stat().st_size}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode() + Path(__file__).read_bytes()).hexdigest()
    directory = cache_directory() / f"{name}-{digest[:16]}"
    if not directory.is_dir():
        try:
            _write_at_once(directory, config, bundled, seed)
        except OSError as error:
            raise UsageError(f"{directory} can not be written ({error.strerror}): set XDG_CACHE_HOME") from None
    return directory


def cache_directory() -> Path:
    """Where the XDG rules put what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kakera" / "specs"


def write(directory: Path, config: dict[str, Any], bundled: Path, seed: int) -> None:
    """All files of a model but its weights. Raises CheckpointError for a config of no model that is known, UsageError
    for a vocabulary without room for all bytes."""
    vocab = spec_of(config).vocab
    tokenizer = stand_in(json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8")), vocab)
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    pattern = json.loads((bundled / "tokenizer_config.json").read_text(encoding="utf-8"))
    generation = json.loads((bundled / "generation_config.json").read_text(encoding="utf-8"))
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    documents = {
        "config.json": {
            **config,
            **config.get("text_config", {}),
            "text_config": {},
            "eos_token_id": ends,
            RANDOM_WEIGHTS: seed,
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "eos_token": pattern["eos_token"],
            "added_tokens_decoder": {i: {"content": name} for name, i in ids.items()},
        },
        "generation_config.json": {
            **{name: value for name, value in generation.items() if "token" not in name},
            "eos_token_id": ends,
        },
    }
    for file, document in documents.items():
        (directory / file).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    shutil.copy(bundled / "chat_template.jinja", directory)


def stand_in(document: dict[str, Any], vocab: int) -> dict[str, Any]:
    """tokenizer.json with exactly `vocab` ids: bytes, the first merges, words for what is left, and the added tokens.

    `document`: a byte-level BPE tokenizer whose id 256 + i is what merge i makes.
    """
    model, added = document["model"], document["added_tokens"]
    room = vocab - len(added)
    if room < BYTES:
        raise UsageError(f"a vocabulary of {vocab} has no room for {BYTES} bytes and {len(added)} added tokens")
    known = {text: token for text, token in model["vocab"].items() if token < room}
    names = (word for word in _words() if word not in known)
    known |= {word: len(known) + i for i, word in enumerate(itertools.islice(names, room - len(known)))}
    return {
        **document,
        "added_tokens": [{**token, "id": room + i} for i, token in enumerate(added)],
        # a word that has an id is that token, merges or not: so are the ones that no merge makes
        "model": {**model, "vocab": known, "merges": model["merges"][: room - BYTES], "ignore_merges": True},
    }


def _words() -> Iterator[str]:
    """Six letters behind a space: 343,000 of them."""
    for letters in itertools.product(CONSONANTS, VOWELS, repeat=3):
        yield "Ġ" + "".join(letters)


def _write_at_once(directory: Path, config: dict[str, Any], bundled: Path, seed: int) -> None:
    """So that no reader meets half a directory; another process may have been quicker."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        write(part, config, bundled, seed)
        part.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
