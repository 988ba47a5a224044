"""--url: where a server with OpenAI's API answers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kakera.errors import UsageError


@dataclass(frozen=True)
class Endpoint:
    """Where a server with OpenAI's API answers. `base` is the path up to and with /v1."""

    scheme: str
    host: str
    port: int
    base: str
    key: str | None = None

    @staticmethod
    def of(url: str, key: str | None = None) -> Endpoint:
        """Raises UsageError for a URL or a key that is none."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname or "", None
        try:
            port = parts.port
        except ValueError:
            host = ""
        if not host or parts.scheme not in ("http", "https"):
            raise UsageError(f"--url {url}: give where a server answers, such as http://127.0.0.1:30000")
        if key and not (key.isascii() and key.isprintable()):
            raise UsageError("--api-key: a key is made of printable ASCII letters")
        base = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1") + "/v1"
        return Endpoint(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), base, key)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"
