"""Config: the keys of a config.json as an architecture's file asks for them. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kakera.arch.computed import Computed
from kakera.arch.end_tokens import Beside, end_tokens
from kakera.errors import CheckpointError

LARGEST = 2**28  # of any size: what is beyond it is a slip, and sums over it need not be fast
MOST_LAYERS = 4096

# keys of other architectures: a model that has one computes something that its declaration does not say
FOREIGN = (
    *("hc_", "indexer_", "ple_", "ngram_", "heads_per_ngram", "split_ngram_", "make_ngram_"),
    *("moe_", "num_experts", "shared_expert_", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"),
    *(
        "n_routed_",
        "n_shared_",
        "num_local_experts",
        "num_shared_",
        "routed_scaling",
        "scoring_func",
        "topk_",
        "n_group",
    ),
    *("kv_lora_", "q_lora_", "qk_rope_", "qk_nope_", "v_head_dim", "ssm_", "mamba_", "first_k_dense"),
)


class Config:
    """The text model's keys, over those of the whole model. `asked`: keys that a declaration has looked at."""

    def __init__(self, config: Mapping[str, Any], beside: Beside | None = None):
        text = config.get("text_config") or {}
        self._values: dict[str, Any] = {**config, **text}
        self._parts, self._beside = (text, config), beside or Beside()
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
            raise TypeError(f"{key} is {short(size)}")
        if size < least:
            raise CheckpointError(f"config.json: {key} is {short(size)}, which is no size")
        if size > most:
            raise CheckpointError(f"config.json: {key} is {short(size)}; the most that is understood is {most}")
        return size

    def layers(self, key: str, default: int | None = None) -> int:
        """A number of layers; where there is a default, there may be none."""
        return self.size(key, default, least=1 if default is None else 0, most=MOST_LAYERS)

    def number(self, key: str, default: float) -> float:
        """A positive, finite number. Raises TypeError, CheckpointError."""
        return positive(key, self.get(key, default))

    def tied(self) -> bool:
        """Whether the head is the embedding; the whole model's word counts like that of the text model in it."""
        return any(_switch(part, "tie_word_embeddings") for part in self._parts)

    def end_tokens(self) -> tuple[int, ...]:
        """Of all files that name some. Raises CheckpointError."""
        return end_tokens(self._parts, self._beside, self.size("vocab_size"))

    def refuse_others(self, computed: Computed) -> None:
        """Raise CheckpointError for keys that have another value than those that are computed."""
        found = [(key, self.get(key), values) for key, values in computed.items()]
        others = [(key, value, values) for key, value, values in found if value is not None and value not in values]
        if others:
            told = [f"{k} is {short(v)} (kakera computes {_either(values)})" for k, v, values in others]
            raise CheckpointError(f"config.json: {', '.join(told)}: the model is another one than kakera computes")

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


def _switch(part: Mapping[str, Any], key: str) -> bool:
    value = part.get(key)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{key} is {short(value)}")
    return bool(value)


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(map(short, values)) or "models without it"


def positive(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{key} is {short(value)}")
    if not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key} is {short(value)}, which is no positive number")
    return float(value)


def short(value: Any) -> str:
    """As Python writes it, in at most 60 letters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
