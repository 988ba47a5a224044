"""Token ids to text while they arrive: only whole characters come out."""

from __future__ import annotations

import codecs

from kakera.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one stream. Control tokens are silent. Bytes that can never be UTF-8 become U+FFFD at once."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes, possibly none."""
        if self._tokenizer.is_control(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """One U+FFFD if the stream ended within a character, else nothing."""
        return self._decoder.decode(b"", final=True)
