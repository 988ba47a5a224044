"""Text to token ids and back, for byte-level BPE tokenizers in the Hugging Face format.

Added tokens (`<|im_end|>`, `<think>`, ...) are cut out here and not by the tokenizers library, because whether a
spelling counts as the token depends on who wrote it: a template's marker does, a user's text does not.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer

from kakera.contract.request import packed
from kakera.errors import CheckpointError
from kakera.text.unicode import well_formed

CACHE_TOKENS = 2_000_000  # 4 bytes each: ten conversations of 200K tokens in 8 MB, their text apart


@dataclass(frozen=True)
class AddedToken:
    """A token outside the BPE vocabulary. `control` ones are never shown to a reader (the format's "special")."""

    id: int
    text: str
    control: bool


class SegmentCache:
    """Least recently used map from text to its ids, bounded by the tokens it holds. Safe to use from threads."""

    def __init__(self, limit_tokens: int = CACHE_TOKENS):
        self._limit = limit_tokens
        self._held = 0
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str) -> array[int] | None:
        with self._lock:
            ids = self._entries.get(text)
            if ids is not None:
                self._entries.move_to_end(text)
            return ids

    def put(self, text: str, ids: array[int]) -> None:
        with self._lock:
            if text in self._entries or len(ids) > self._limit:
                return
            self._entries[text] = ids
            self._held += len(ids)
            while self._held > self._limit:
                self._held -= len(self._entries.popitem(last=False)[1])


class Tokenizer:
    """The tokenizer of one model directory. Every method may be called from any thread."""

    def __init__(self, document: dict[str, Any], eos_text: str | None = None):
        """`document` is a parsed tokenizer.json. Raises CheckpointError if it is not byte-level."""
        if (document.get("decoder") or {}).get("type") != "ByteLevel":
            raise CheckpointError("tokenizer.json: only byte-level BPE tokenizers are supported")
        added = [AddedToken(t["id"], t["content"], t["special"]) for t in document["added_tokens"]]
        self.added = {token.text: token for token in added}
        self._bpe = BpeTokenizer.from_str(json.dumps({**document, "added_tokens": []}))
        longest_first = sorted(self.added, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._bytes = _token_bytes(self._bpe.get_vocab(), added)
        self._control = frozenset(token.id for token in added if token.control)
        self._cache = SegmentCache()
        self._ids_by_bytes: dict[bytes, int] | None = None
        self.eos = self.added[eos_text].id if eos_text in self.added else None

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json. Raises CheckpointError naming a file that is missing."""
        config = directory / "tokenizer_config.json"
        eos = _read_json(config).get("eos_token") if config.is_file() else None
        document = _read_json(directory / "tokenizer.json")
        return Tokenizer(document, eos["content"] if isinstance(eos, dict) else eos)

    @property
    def vocab(self) -> int:
        """One more than the largest token id."""
        return max(self._bytes) + 1

    def is_control(self, token: int) -> bool:
        return token in self._control

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids. Spellings of added tokens are plain text unless `allow_special`."""
        ids: list[int] = []
        for piece in self.split(text) if allow_special else [text]:
            ids.extend([piece.id] if isinstance(piece, AddedToken) else self.encode_segment(piece))
        return ids

    def split(self, text: str) -> Iterator[AddedToken | str]:
        """Cut at every spelling of an added token: tokens never reach over such a cut, so pieces encode alone."""
        end = 0
        for match in self._markers.finditer(text):
            if match.start() > end:
                yield text[end : match.start()]
            yield self.added[match.group()]
            end = match.end()
        if end < len(text):
            yield text[end:]

    def encode_segment(self, text: str) -> array[int]:
        """Ids of a text without added tokens, remembered: the next turn of a conversation sends the same text again."""
        ids = self._cache.get(text)
        if ids is None:
            ids = packed(self._bpe.encode_batch_fast([well_formed(text)], add_special_tokens=False)[0].ids)
            self._cache.put(text, ids)
        return ids

    def hide_markers(self, text: str, mask: str, control_only: bool = False) -> str:
        """Put the character `mask` into every spelling of an added token, so that `split` passes it over.

        `control_only` leaves the others (`<think>`, `<tool_call>`) alone: in the words of the model they are tokens.
        """

        def hide(match: re.Match[str]) -> str:
            found = match.group()
            visible = control_only and not self.added[found].control
            return found if visible else found[0] + mask + found[1:]

        while (hidden := self._markers.sub(hide, text)) != text:  # again: spellings can overlap
            text = hidden
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; empty for ids that no token has (a padded vocabulary)."""
        return self._bytes.get(token, b"")

    def token_of_bytes(self, data: bytes) -> int | None:
        """The one token that stands for exactly these bytes, if there is one."""
        if self._ids_by_bytes is None:
            self._ids_by_bytes = {value: token for token, value in self._bytes.items()}
        return self._ids_by_bytes.get(data)

    def decode(self, tokens: Iterable[int], skip_control: bool = False) -> str:
        """Text of a whole token list; bytes that are no UTF-8 become U+FFFD."""
        kept = (t for t in tokens if not (skip_control and t in self._control))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: without it no text can be read; copy it from the original model")
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    return document


def _token_bytes(vocab: dict[str, int], added: list[AddedToken]) -> dict[int, bytes]:
    alphabet = byte_alphabet()
    known = alphabet.keys()
    table = {id: bytes(map(alphabet.__getitem__, text)) for text, id in vocab.items() if known >= set(text)}
    table.update({token.id: token.text.encode() for token in added})
    return table


def byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of the 256 bytes to printable characters, the other way round: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
