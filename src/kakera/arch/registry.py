"""From a model directory or a config to the declaration of its model, by `model_type`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kakera.arch import qwen3, qwen3_5, qwen4_exp
from kakera.arch.blocks import AttentionSpec
from kakera.arch.config import Config
from kakera.arch.spec import ModelSpec
from kakera.arch.stored import parsed
from kakera.errors import CheckpointError, Unserved

Declare = Callable[[Config], ModelSpec]
ARCHITECTURES: dict[str, Declare] = {
    "qwen3_5": qwen3_5.declare,
    "qwen3_5_text": qwen3_5.declare,
    "qwen3": qwen3.declare,
}
PLANNED: dict[str, Declare] = {  # `ModelSpec.unserved` says why
    "qwen4_exp": qwen4_exp.declare,
    "qwen4_exp_text": qwen4_exp.declare,
}


def refuse_unserved(config: Any) -> None:
    """Raise Unserved for the config of a model that can only be planned, before anything is downloaded or loaded."""
    if isinstance(config, dict) and config.get("model_type") in list(PLANNED):
        spec_of(config)


def load_spec(directory: Path, *, planned: bool = False) -> ModelSpec:
    """Read `config.json` (and `generation_config.json` for the end tokens) of a model directory. `planned`, errors: as
    of `spec_of`."""
    path = directory / "config.json"
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: it is not a model directory")
    try:
        config = parsed(path.read_bytes())
        extra = directory / "generation_config.json"
        generation = parsed(extra.read_bytes()) if extra.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(generation, dict):
        raise CheckpointError(f"{path} and generation_config.json must hold JSON objects")
    return spec_of(config, generation, planned=planned)


def spec_of(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, *, planned: bool = False
) -> ModelSpec:
    """Raises CheckpointError for a model type that is not supported, a key that is missing or one that is not known;
    Unserved for a model that can only be planned, unless it is to be `planned`."""
    try:
        keys = Config(config, generation)
        kind = keys.get("model_type")
        declare = ARCHITECTURES.get(kind) or PLANNED.get(kind)
        if declare is None:
            raise CheckpointError(f"model_type {kind!r} is not supported; kakera serves {', '.join(ARCHITECTURES)}")
        spec = declare(keys)
        _check(spec)
    except KeyError as error:
        raise CheckpointError(f"config.json lacks the key {error}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json: a value has the wrong type ({error})") from None
    if spec.unserved and not planned:
        raise Unserved(spec.unserved)
    return spec


def _check(spec: ModelSpec) -> None:
    if spec.gdn is not None and spec.gdn.v_heads % spec.gdn.k_heads:
        raise CheckpointError(f"{spec.gdn.v_heads} value heads can not share {spec.gdn.k_heads} key heads evenly")
    for block in spec.distinct:
        if not isinstance(block, AttentionSpec):
            continue
        if block.heads % block.kv_heads:
            raise CheckpointError(f"{block.heads} query heads can not share {block.kv_heads} KV heads evenly")
        if not 0 < block.rotary_dim <= block.head_dim or block.rotary_dim % 2:
            raise CheckpointError(
                f"config.json: {block.rotary_dim} of a head's {block.head_dim} channels turn (partial_rotary_factor); "
                "that must be an even number of them"
            )
