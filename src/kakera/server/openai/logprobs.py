"""Log-probabilities as OpenAI's classic dialects send them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from kakera.contract.events import TokenLogprob
from kakera.text.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0  # JSON has no -inf; clients expect a finite number


def finite(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR) if not math.isnan(logprob) else LOGPROB_FLOOR


def chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer, alternatives: int) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": token_text(data), "logprob": finite(logprob), "bytes": list(data)}

    content = [
        {**entry(lp.token, lp.logprob), "top_logprobs": [entry(*pair) for pair in lp.top[:alternatives]]}
        for lp in logprobs
    ]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """The `logprobs` object of a text completion: parallel lists, with offsets into the returned text."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int, offset: int = 0):
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may take several tokens
        self._lists: dict[str, list[Any]] = {}
        self.clear()

    def clear(self) -> None:
        self._lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_unknown(self, token: int) -> None:
        """The first token of a prompt: nothing comes before it, so it has no probability."""
        self._append(token, None, None)

    def add(self, logprob: TokenLogprob) -> None:
        pairs = [*logprob.top[: self._alternatives], (logprob.token, logprob.logprob)]
        top = {token_text(self._tokenizer.token_bytes(token)): finite(value) for token, value in pairs}
        self._append(logprob.token, finite(logprob.logprob), top)

    def take(self) -> dict[str, list[Any]]:
        lists = self._lists
        self.clear()
        return lists

    def _append(self, token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        data = self._tokenizer.token_bytes(token)
        row = {
            "tokens": token_text(data),
            "token_logprobs": logprob,
            "top_logprobs": top,
            "text_offset": self._offset,
        }
        for name, value in row.items():
            self._lists[name].append(value)
        self._offset += len(self._decoder.decode(data))


def token_text(data: bytes) -> str:
    """A token's text, or its bytes spelled out where it is only part of a character, so that no two look alike."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
