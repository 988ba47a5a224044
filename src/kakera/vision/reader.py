"""ImageReader: pictures of what clients send, within the limits of a model and of whoever serves it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace

from kakera.arch.preprocessor import Pixels
from kakera.errors import RequestRefused
from kakera.vision.decode import resized_size
from kakera.vision.fetch import Fetcher
from kakera.vision.picture import Picture, picture
from kakera.vision.sources import of_url

LOW_TOKENS = 256  # of an image that is asked for in low detail
AT_ONCE, PATIENCE = 2, 10.0  # images decoded at a time, of up to 150 MB each; seconds that another one waits for a turn
KEPT_BYTES = 64 * 10**6  # of pixels: an agent sends its history's pictures with every turn


class ImageReader:
    """Thread-safe. `tokens`: the most of an image; larger ones are scaled down. Without a `fetcher` an image is a data
    URL."""

    def __init__(self, pixels: Pixels, tokens: int, kept_bytes: int = KEPT_BYTES, fetcher: Fetcher | None = None):
        self.pixels, self.tokens, self.fetcher = pixels, tokens, fetcher
        self._most_kept = kept_bytes
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._kept: dict[bytes, Picture] = {}  # by what was sent, the least recently used first

    def look(self, url: str, low: bool = False) -> Picture:
        """What a URL holds; `low` detail. Raises RequestRefused: 400 for what is no image that is read, 503 if too many
        are being decoded."""
        return self.picture(of_url(url, self.fetcher), low)

    def measure(self, url: str, low: bool = False) -> Picture:
        """The same without pixels, by the header alone, rows and columns perhaps swapped: enough to count tokens."""
        limits = self._limits(low)
        height, width = resized_size(of_url(url, self.fetcher), limits)
        return Picture(height // limits.factor, width // limits.factor, b"", b"")

    def picture(self, data: bytes, low: bool = False) -> Picture:
        """As `look`, of the bytes of an image file."""
        name = hashlib.sha256(b"low" if low else b"high", usedforsecurity=False)
        name.update(data)
        key = name.digest()
        with self._lock:
            if (known := self._kept.pop(key, None)) is not None:
                self._kept[key] = known
                return known
        found = self._in_turn(lambda: picture(data, self._limits(low)))
        with self._lock:
            self._kept[key] = found
            while sum(len(kept.pixels) for kept in self._kept.values()) > self._most_kept:
                del self._kept[next(iter(self._kept))]
        return found

    def _limits(self, low: bool) -> Pixels:
        tokens = min(self.tokens, LOW_TOKENS) if low else self.tokens
        most = min(self.pixels.most, tokens * self.pixels.factor**2)
        return replace(self.pixels, least=min(self.pixels.least, most), most=most)

    def _in_turn(self, work: Callable[[], Picture]) -> Picture:
        if not self._turns.acquire(timeout=PATIENCE):
            raise RequestRefused("too many images are being decoded; send it again", status=503, code="overloaded")
        try:
            return work()
        finally:
            self._turns.release()
