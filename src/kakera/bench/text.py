"""Prompts of a wanted length whose beginnings all differ, so that only a wanted prefix is ever cached."""

from __future__ import annotations

import itertools

from kakera.evaluate.data import load_documents


class Prose:
    """Slices of held-out text. `chars_per_token` is corrected by what the server counts (`calibrate`)."""

    def __init__(self, seed: int = 0, chars_per_token: float = 4.0):
        self.text = "\n\n".join(load_documents(None))
        self.chars_per_token = chars_per_token
        self._number = itertools.count(seed * 1000)

    def calibrate(self, text: str, prompt_tokens: int) -> None:
        """Take over the density of a prompt that the server has counted."""
        self.chars_per_token = len(text) / max(1, prompt_tokens)

    def take(self, tokens: int) -> str:
        """About `tokens` tokens of prose, starting with a number that no other prompt of this source starts with."""
        number = next(self._number)
        need = int(tokens * self.chars_per_token)
        start = number * 7919 % len(self.text)  # a prime step: neighbours start at far-off places
        text = self.text[start:]
        while len(text) < need:
            text += "\n\n" + self.text
        return f"Note {number}. {text}"[:need]
