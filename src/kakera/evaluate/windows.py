"""Held-out text as windows of equally many tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kakera.errors import UsageError
from kakera.evaluate.data import load_documents
from kakera.text.tokenizer import Tokenizer

Window = tuple[int, ...]


def cut(
    documents: Iterable[str],
    encode: Callable[[str], Sequence[int]],
    end_token: int | None,
    size: int,
    limit: int | None = None,
    seed: int = 0,
) -> list[Window]:
    """Cut the documents, each followed by `end_token`, into windows of `size` tokens; a shorter rest is left out.

    `limit` keeps that many windows: a sample drawn by `seed`, in text order. Raises UsageError if there is no window.
    """
    if size < 2:
        raise UsageError(f"--window {size}: a window needs at least 2 tokens")
    stream: list[int] = []
    for text in documents:
        stream += encode(text)
        if end_token is not None:
            stream.append(end_token)
    windows = [tuple(stream[i : i + size]) for i in range(0, len(stream) - size + 1, size)]
    if not windows:
        raise UsageError(f"the text has {len(stream)} tokens, less than one window of {size}; use a smaller --window")
    if limit is not None and limit < len(windows):
        windows = [windows[i] for i in sorted(random.Random(seed).sample(range(len(windows)), limit))]
    return windows


def cut_held_out(
    tokenizer: Tokenizer, size: int, limit: int | None = None, data: Path | None = None, seed: int = 0
) -> list[Window]:
    """Windows of the held-out text, or of the file `data`; each document is followed by its end token."""
    end = tokenizer.added.get("<|endoftext|>")  # the name in this family of models
    return cut(load_documents(data), tokenizer.encode, end.id if end else None, size, limit, seed)
