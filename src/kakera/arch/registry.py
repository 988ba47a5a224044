"""From a model directory or a config to the declaration of its model, by `model_type`. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kakera.arch import qwen3, qwen3_5, qwen4_exp
from kakera.arch.blocks import AttentionSpec
from kakera.arch.config import Config
from kakera.arch.spec import ModelSpec
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
    if isinstance(config, dict) and config.get("model_type") in PLANNED:
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
        config = json.loads(path.read_text())
        extra = directory / "generation_config.json"
        generation = json.loads(extra.read_text()) if extra.is_file() else {}
    except ValueError as error:  # not JSON, or not UTF-8
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
    for block in spec.distinct:
        if not isinstance(block, AttentionSpec):
            continue
        if not isinstance(block.head_dim, int) or block.head_dim < 1:
            raise CheckpointError(f"config.json: head_dim is {block.head_dim!r}, which is no size")
        if block.heads % block.kv_heads:
            raise CheckpointError(f"{block.heads} query heads can not share {block.kv_heads} KV heads evenly")
