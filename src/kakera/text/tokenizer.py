"""Text to token ids and back, for byte-level BPE tokenizers in the Hugging Face format.

Added tokens (`<|im_end|>`, `<think>`, ...) are cut out here and not by the tokenizers library, because whether a
spelling counts as the token depends on who wrote it: a template's marker does, a user's text does not.
"""

from __future__ import annotations

import contextlib
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as BpeTokenizer

from kakera.arch.documents import read_object
from kakera.arch.end_tokens import name_in
from kakera.contract.request import packed
from kakera.errors import CheckpointError
from kakera.text.slices import SLICE, slices
from kakera.text.unicode import well_formed

CACHE_TOKENS = 2_000_000  # 4 bytes each: ten conversations of 200K tokens in 8 MB, their text apart
SMALL = 1_048_576  # characters, not estimated, which takes 6 ms in a turn of 190K tokens: making their tokens takes 1 s
NFC_SHRINKS = 3  # times, in bytes, at most: U+212A becomes K, three conjoining jamo become one syllable
INEXACT = 0.9  # of the tokens of a text that was cut anywhere, the whole has more

# Called in long work with the tokens so far, or with as many as there must be; raises to end the work.
Watch = Callable[[int], None]


def unwatched(tokens: int) -> None:
    """Whoever asks waits for the end, however long it takes."""


def after(tokens: int, watch: Watch) -> Watch:
    """For a part of the work before which there were so many tokens."""
    return watch if watch is unwatched else lambda more: watch(tokens + more)


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
        self._shares = _shares(self._bytes)
        self._shrinks = {None: 1, "NFC": NFC_SHRINKS}.get((document.get("normalizer") or {}).get("type"))
        self._cache = SegmentCache()
        self._ids_by_bytes: dict[bytes, int] | None = None
        self.eos = self.added[eos_text].id if eos_text in self.added else None

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json. Raises CheckpointError for one missing or damaged."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: without it no text can be read; copy it from the original model")
        end = name_in(read_object(directory / "tokenizer_config.json").get("eos_token"))
        try:
            return Tokenizer(read_object(path), end)
        except CheckpointError:
            raise
        except Exception as error:  # the library's own errors have no type
            raise CheckpointError(f"{path} is no tokenizer that can be read ({error!r})") from None

    @property
    def vocab(self) -> int:
        """One more than the largest token id."""
        return max(self._bytes) + 1

    def is_control(self, token: int) -> bool:
        return token in self._control

    @property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return self._shares[-1][0]

    def least_tokens(self, text: str, hidden: str = "") -> int:
        """A number that the text's tokens can not be below, without making them; 0 for a text of up to `SMALL`.

        Of each byte's token the byte is 1/n at least, where n is the length of the longest token that has such a byte;
        so the sum of these over the text is never above its tokens. 30 MB take 0.1 s. `hidden` does not count.
        """
        if len(text) <= SMALL or self._shrinks is None:
            return 0
        text = text.replace(hidden, "") if hidden else text
        shrinks = 1 if text.isascii() else self._shrinks
        share = 0.0
        for start in range(0, len(text), SLICE):
            data = text[start : start + SLICE].encode("utf-8", "ignore")
            for length, others in self._shares:
                share += len(data.translate(None, others)) / length
        return int(share / shrinks)

    def encode(self, text: str, allow_special: bool = False, watch: Watch = unwatched) -> list[int]:
        """Token ids. Spellings of added tokens are plain text unless `allow_special`."""
        watch(self.least_tokens(text))
        ids: list[int] = []
        for piece in self.split(text) if allow_special else [text]:
            watch(len(ids))
            more = after(len(ids), watch)
            ids.extend([piece.id] if isinstance(piece, AddedToken) else self.encode_segment(piece, more))
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

    def encode_segment(self, text: str, watch: Watch = unwatched) -> array[int]:
        """Ids of a text without added tokens, remembered: the next turn of a conversation sends the same text again.

        Made in slices, since the library takes 200 bytes a token; between them `watch` may end the work.
        """
        ids = self._cache.get(text)
        if ids is None:
            ids = packed(())
            for piece in slices(well_formed(text), self._parts):
                watch(len(ids))
                if len(piece) > 2 * SLICE and watch is not unwatched:
                    self._estimate(piece, len(ids), watch)
                ids.extend(self._ids(piece))
            self._cache.put(text, ids)
        return ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _parts(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Words as the model's pattern has them."""
        words = self._bpe.pre_tokenizer
        return words.pre_tokenize_str(text) if words is not None else []

    def _estimate(self, word: str, known: int, watch: Watch) -> None:
        """A word of megabytes can not be cut, and once begun its ids can not be stopped: 5 s for 1 MB. Cut anywhere, it
        has nearly as many tokens, so that one which is much too long ends here."""
        counted = 0
        for start in range(0, len(word), SLICE):
            counted += len(self._ids(word[start : start + SLICE]))
            watch(known + int(counted * INEXACT))

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


def _token_bytes(vocab: dict[str, int], added: list[AddedToken]) -> dict[int, bytes]:
    """Without tokens that have other letters than the alphabet's. 0.1 s for 250,000 tokens; letter by letter 0.5."""
    letters = dict.fromkeys(range(256), "\u0100") | {ord(c): chr(byte) for c, byte in byte_alphabet().items()}
    table: dict[int, bytes] = {}
    for text, id in vocab.items():
        with contextlib.suppress(UnicodeEncodeError):
            table[id] = text.translate(letters).encode("latin-1")
    table.update({token.id: token.text.encode() for token in added})
    return table


def _shares(table: dict[int, bytes]) -> list[tuple[int, bytes]]:
    """Classes of bytes: the length of the longest token that has one of them, shortest first, and all other bytes."""
    having: dict[int, set[int]] = {}
    for data in table.values():
        having.setdefault(len(data), set()).update(data)
    longest = [0] * 256
    for length in sorted(having):
        for byte in having[length]:
            longest[byte] = length
    classes: dict[int, list[int]] = {}
    for byte, length in enumerate(longest):
        classes.setdefault(length.bit_length() // 2, []).append(byte)  # up to 1, 7, 31, 127, ... bytes
    return sorted(
        (max(1, *(longest[byte] for byte in members)), bytes(set(range(256)) - set(members)))
        for members in classes.values()
    )


def byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of the 256 bytes to printable characters, the other way round: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
