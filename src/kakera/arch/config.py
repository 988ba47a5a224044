"""Config: the keys of a config.json as an architecture's file asks for them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kakera.errors import CheckpointError

LARGEST = 2**28  # of any size: what is beyond it is a slip, and sums over it need not be fast
MOST_LAYERS = 4096

# keys of other architectures: a model that has one computes something that its declaration does not say
FOREIGN = (
    *("hc_", "indexer_", "ple_", "ngram_", "heads_per_ngram", "split_ngram_", "make_ngram_"),
    *("moe_", "num_experts", "shared_expert_", "mlp_only_layers", "decoder_sparse_step"),
)


class Config:
    """The text model's keys, over those of the whole model. `asked`: keys that a declaration has looked at."""

    def __init__(self, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None):
        self._values: dict[str, Any] = {**config, **(config.get("text_config") or {})}
        self._generation = generation or {}
        self._asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """Raises KeyError."""
        self._asked.add(key)
        return self._values[key]

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self._values.get(key, default)

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A count of something. Without a default it must be there. Raises KeyError, TypeError, CheckpointError if it
        is none."""
        found = self[key] if default is None else self.get(key)
        size = default if found is None and default is not None else found
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{key} is {_short(size)}")
        if size < least:
            raise CheckpointError(f"config.json: {key} is {_short(size)}, which is no size")
        if size > most:
            raise CheckpointError(f"config.json: {key} is {_short(size)}; the most that is understood is {most}")
        return size

    def layers(self, key: str, default: int | None = None) -> int:
        """A number of layers; where there is a default, there may be none."""
        return self.size(key, default, least=1 if default is None else 0, most=MOST_LAYERS)

    def number(self, key: str, default: float) -> float:
        """A positive, finite number. Raises TypeError, CheckpointError."""
        return _positive(key, self.get(key, default))

    def rope(self, key: str, default: float) -> float:
        """As `number`, of `rope_parameters`, or beside it as older files have it."""
        parameters = self.get("rope_parameters") or {}
        return _positive(key, parameters.get(key, self.get(key, default)))

    def end_tokens(self) -> tuple[int, ...]:
        """generation_config.json wins: chat models end a turn with a token that config.json does not name."""
        found: list[int] = []
        for source in (self._generation.get("eos_token_id"), self.get("eos_token_id")):
            for token in source if isinstance(source, list) else [source]:
                if isinstance(token, int) and token not in found:
                    found.append(token)
        return tuple(found)

    def refuse_unknown(self, groups: Iterable[str]) -> None:
        """Raise CheckpointError for a key of `groups` (beginnings of names), or of another architecture, that nobody
        has asked for: what it changes would be computed wrongly in silence."""
        begins = (*groups, *FOREIGN)
        unknown = [k for k, v in self._values.items() if k not in self._asked and k.startswith(begins) and v]
        if unknown:
            raise CheckpointError(
                f"config.json: {', '.join(sorted(unknown))} is not known of {self._values.get('model_type')}: "
                "the model may be another one than kakera serves under that model_type"
            )


def _positive(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{key} is {_short(value)}")
    if not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key} is {_short(value)}, which is no positive number")
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
