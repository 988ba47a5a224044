"""End tokens: every token that a file of the checkpoint says ends an answer. No torch.

generation_config.json and config.json say it in ids, tokenizer_config.json by name; none of them is complete in all
checkpoints: a chat model's generation_config.json may lack the end of a turn, its tokenizer_config.json the end of a
text. So an answer ends at a token that any of them names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kakera.arch.documents import read_object
from kakera.errors import CheckpointError

ID, NAME = "eos_token_id", "eos_token"
IdOf = Callable[[str], int | None]


def _unknown(name: str) -> None:
    return None


@dataclass(frozen=True)
class Beside:
    """Files beside config.json that name end tokens, and the id of a token by name."""

    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    id_of: IdOf = _unknown

    @staticmethod
    def read(directory: Path) -> Beside:
        """Raises CheckpointError for a file that is no JSON object. tokenizer.json, a large one, is read if need be."""
        tokenizer = read_object(directory / "tokenizer_config.json")
        return Beside(read_object(directory / "generation_config.json"), tokenizer, _Ids(directory, tokenizer).of)


def end_tokens(configs: tuple[Mapping[str, Any], ...], beside: Beside, vocab: int) -> tuple[int, ...]:
    """Ids of all, those of generation_config.json first. Left out is what no model can say: ids beyond the vocabulary
    (-1 stands for none), and names of no token. Raises CheckpointError for a value that is neither id nor name."""
    said = [("generation_config.json", ID, beside.generation.get(ID))]
    said += [("config.json", ID, config.get(ID)) for config in configs]
    said += [("tokenizer_config.json", key, beside.tokenizer.get(key)) for key in (NAME, ID)]
    found: dict[int, None] = {}
    for file, key, value in said:
        for item in value if isinstance(value, list | tuple) else [value]:
            for token in _ids(item, beside.id_of, f"{file}: {key}"):
                if 0 <= token < vocab:
                    found[token] = None
    return tuple(found)


def name_in(value: Any) -> str | None:
    """The spelling of a token in tokenizer_config.json, which may stand in an object."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _ids(item: Any, id_of: IdOf, where: str) -> Iterator[int]:
    name = name_in(item)
    if name is not None:
        token = id_of(name)
        if token is None and _digits(name):
            token = int(name)
        if token is not None:
            yield token
    elif isinstance(item, int | float) and not isinstance(item, bool) and item == item // 1:
        yield int(item)
    elif item is not None:
        raise CheckpointError(f"{where} holds {repr(item)[:60]}, which is no token; give the token's id or null")


class _Ids:
    """Ids by name, as tokenizer_config.json has them, else tokenizer.json."""

    def __init__(self, directory: Path, tokenizer: Mapping[str, Any]):
        self._directory = directory
        added = tokenizer.get("added_tokens_decoder")
        listed = added.items() if isinstance(added, dict) else ()
        self._known = {name_in(token): int(i) for i, token in listed if _digits(i)}

    def of(self, name: str) -> int | None:
        return self._known[name] if name in self._known else self._all.get(name)

    @cached_property
    def _all(self) -> dict[str, int]:
        document = read_object(self._directory / "tokenizer.json")
        model, added = document.get("model"), document.get("added_tokens")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        found = dict(vocab) if isinstance(vocab, dict) else {}
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str):
                found[token["content"]] = token["id"]
        return {name: token for name, token in found.items() if isinstance(token, int)}


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12
