"""ModelSpec: the shape of a model, read once from its config.json. No torch.

Every room takes sizes from here and from nowhere else. Source of the numbers: the transformers configs of
model types qwen3_5, qwen3_5_text (hybrid) and qwen3 (all attention).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kakera.errors import CheckpointError

LayerKind = Literal["gdn", "full"]
HYBRID_TYPES = ("qwen3_5", "qwen3_5_text")
PLAIN_TYPES = ("qwen3",)


@dataclass(frozen=True)
class GdnSpec:
    """Sizes of a Gated DeltaNet layer. Head counts, head widths in channels, convolution taps."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_taps: int

    @property
    def conv_channels(self) -> int:
        """Channels of q | k | v, all of which go through the convolution."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def state_values(self) -> int:
        """Values of one layer's recurrent state S [v_heads, k_dim, v_dim]."""
        return self.v_heads * self.k_dim * self.v_dim

    @property
    def conv_values(self) -> int:
        """Values of one layer's convolution state: the last taps - 1 columns."""
        return (self.conv_taps - 1) * self.conv_channels


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a text model. `gated`/`norm_offset` tell qwen3_5 (True/1) from qwen3 (False/0)."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    max_positions: int
    rms_eps: float
    gated: bool
    norm_offset: float
    tied: bool
    mtp_layers: int
    gdn: GdnSpec | None
    eos: tuple[int, ...]

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if kind == "full")

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if kind == "gdn")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_values_per_token(self) -> int:
        """Values of K and V of one token over all full-attention layers."""
        return 2 * len(self.full_layers) * self.kv_heads * self.head_dim

    @staticmethod
    def load(directory: Path) -> ModelSpec:
        """Read `config.json` (and `generation_config.json` for the end tokens) of a model directory."""
        path = directory / "config.json"
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory")
        if not path.is_file():
            raise CheckpointError(f"{directory} has no config.json: it is not a model directory")
        try:
            config = json.loads(path.read_text())
            extra = directory / "generation_config.json"
            generation = json.loads(extra.read_text()) if extra.is_file() else {}
        except ValueError as error:  # not JSON, or not UTF-8
            raise CheckpointError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(config, dict) or not isinstance(generation, dict):
            raise CheckpointError(f"{path} and generation_config.json must hold JSON objects")
        return ModelSpec.from_config(config, generation)

    @staticmethod
    def from_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
        """Raises CheckpointError for a model type that is not supported or a key that is missing."""
        text = {**config, **config.get("text_config", {})}
        kind = text.get("model_type", config.get("model_type"))
        if kind not in HYBRID_TYPES + PLAIN_TYPES:
            raise CheckpointError(
                f"model_type {kind!r} is not supported; kakera serves {', '.join(HYBRID_TYPES + PLAIN_TYPES)}"
            )
        try:
            return _build(text, kind in HYBRID_TYPES, _end_tokens(text, generation or {}))
        except KeyError as error:
            raise CheckpointError(f"config.json lacks the key {error}") from None
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(f"config.json: a value has the wrong type ({error})") from None


def _build(text: dict[str, Any], hybrid: bool, eos: tuple[int, ...]) -> ModelSpec:
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    rope = {**text, **(text.get("rope_parameters") or {})}
    partial = rope.get("partial_rotary_factor", 0.25 if hybrid else 1.0)
    spec = ModelSpec(
        model_type=text["model_type"],
        vocab=text["vocab_size"],
        hidden=text["hidden_size"],
        intermediate=text["intermediate_size"],
        layers=_layer_kinds(text, hybrid),
        heads=heads,
        kv_heads=text["num_key_value_heads"],
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial),
        rope_theta=float(rope.get("rope_theta", 1e7 if hybrid else 1e6)),
        max_positions=text["max_position_embeddings"],
        rms_eps=text.get("rms_norm_eps", 1e-6),
        gated=hybrid,
        norm_offset=1.0 if hybrid else 0.0,
        tied=bool(text.get("tie_word_embeddings", False)),
        mtp_layers=text.get("mtp_num_hidden_layers", 0) if hybrid else 0,
        gdn=_gdn(text) if hybrid else None,
        eos=eos,
    )
    for name in ("vocab", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "max_positions"):
        if not isinstance(size := getattr(spec, name), int) or size < 1:
            raise CheckpointError(f"config.json: {name} is {size!r}, which is no size")
    if spec.heads % spec.kv_heads:
        raise CheckpointError(f"{spec.heads} query heads can not share {spec.kv_heads} KV heads evenly")
    return spec


def _layer_kinds(text: dict[str, Any], hybrid: bool) -> tuple[LayerKind, ...]:
    count = int(text["num_hidden_layers"])
    if not hybrid:
        full: LayerKind = "full"
        return (full,) * count
    names: dict[str, LayerKind] = {"linear_attention": "gdn", "full_attention": "full"}
    if types := text.get("layer_types"):
        unknown = sorted(set(types) - set(names))
        if unknown or len(types) != count:
            raise CheckpointError(f"layer_types: {len(types)} entries for {count} layers, unknown kinds {unknown}")
        return tuple(names[t] for t in types)
    interval = text.get("full_attention_interval", 4)
    return tuple("full" if (i + 1) % interval == 0 else "gdn" for i in range(count))


def _gdn(text: dict[str, Any]) -> GdnSpec:
    return GdnSpec(
        k_heads=text["linear_num_key_heads"],
        v_heads=text["linear_num_value_heads"],
        k_dim=text["linear_key_head_dim"],
        v_dim=text["linear_value_head_dim"],
        conv_taps=text.get("linear_conv_kernel_dim", 4),
    )


def _end_tokens(text: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json wins: chat models end a turn with a token that config.json does not name."""
    found: list[int] = []
    for source in (generation.get("eos_token_id"), text.get("eos_token_id")):
        for token in source if isinstance(source, list) else [source]:
            if isinstance(token, int) and token not in found:
                found.append(token)
    return tuple(found)
