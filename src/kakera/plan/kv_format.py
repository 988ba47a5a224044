"""KvFormat: how keys and values are stored, and the one place that knows how many bytes that takes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kakera.arch.layout import page_record, record_bytes, sink_record
from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.errors import UsageError

KvCodec = Literal["fp32", "bf16", "int2"]
_DENSE_BYTES = {"fp32": 4, "bf16": 2}
PARAMETER_BYTES = 2 * 2  # fp16 scale + fp16 minimum of a group


@dataclass(frozen=True)
class KvFormat:
    """`group` (rotated dims that share a scale) and `window_pages` (R) matter for int2 only."""

    codec: KvCodec
    group: int = 256
    window_pages: int = 4

    def check(self, head_dim: int) -> None:
        """Refuse at start what could only fail at the first request. Raises UsageError."""
        if self.codec not in ("fp32", "bf16", "int2"):
            raise UsageError(f"--kv {self.codec}: unknown KV codec; choose fp32, bf16 or int2")
        if self.codec != "int2":
            return
        if head_dim & (head_dim - 1):
            raise UsageError(f"--kv int2 needs a head_dim that is a power of two, this model has {head_dim}; use bf16")
        if self.group & (self.group - 1) or not 32 <= self.group <= head_dim:
            raise UsageError(f"--kv-group {self.group}: must be a power of two from 32 to head_dim ({head_dim})")
        if self.window_pages < 1:
            raise UsageError(f"--kv-window {self.window_pages * PAGE}: must be at least {PAGE} tokens")

    @property
    def windowed(self) -> bool:
        """True if pages are lossy and a 16-bit sink and window exist beside them."""
        return self.codec == "int2"

    @property
    def checkpoint_pages(self) -> int:
        """16-bit pages that a checkpoint carries."""
        return self.window_pages if self.windowed else 0

    @property
    def ring_pages(self) -> int:
        """Pages of the 16-bit window ring of a running request."""
        return self.window_pages + 2 if self.windowed else 0

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one key or one value of one KV head in the page pool."""
        if self.codec == "int2":
            return head_dim // 4 + head_dim // self.group * PARAMETER_BYTES
        return head_dim * _DENSE_BYTES[self.codec]

    def token_bytes(self, spec: ModelSpec) -> int:
        """Bytes of one token in the page pool, all layers."""
        return self.page_bytes(spec) // PAGE

    def read_bytes(self, spec: ModelSpec, tokens: int) -> int:
        """Bytes of the page pool that attention reads for one token behind `tokens`: all keys and values, or those that
        a selector leaves and all that it looks at."""
        coded = spec.kv_values_per_token // spec.head_dim * self.vector_bytes(spec.head_dim)
        selector = spec.attention.selector
        read = min(tokens, selector.tokens) if selector else tokens
        return tokens * (self.token_bytes(spec) - coded) + read * coded

    def page_bytes(self, spec: ModelSpec) -> int:
        return record_bytes(page_record(spec, self.vector_bytes))

    def window_page_bytes(self, spec: ModelSpec) -> int:
        """Bytes of one 16-bit page (sink or window), K and V, all full-attention layers; 0 for dense codecs."""
        return record_bytes(sink_record(spec)) if self.windowed else 0

    def slot_bytes(self, spec: ModelSpec) -> int:
        """Bytes of the window ring and the sink page of one running request."""
        return (self.ring_pages + 1) * self.window_page_bytes(spec) if self.windowed else 0
