"""From a model directory or a config to the declaration of its model, by `model_type`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kakera.arch import qwen3, qwen3_5, qwen3_5_moe, qwen4_exp
from kakera.arch.blocks import AttentionSpec
from kakera.arch.computed import COMMON
from kakera.arch.config import Config
from kakera.arch.documents import read_object
from kakera.arch.end_tokens import Beside
from kakera.arch.formats import refuse_directory, refuse_file, refuse_method
from kakera.arch.spec import ModelSpec
from kakera.errors import CheckpointError, Unserved

Declare = Callable[[Config], ModelSpec]
ARCHITECTURES: dict[str, Declare] = {
    "qwen3_5": qwen3_5.declare,
    "qwen3_5_text": qwen3_5.declare,
    "qwen3_5_moe": qwen3_5_moe.declare,
    "qwen3_5_moe_text": qwen3_5_moe.declare,
    "qwen3": qwen3.declare,
}
PLANNED: dict[str, Declare] = {  # `ModelSpec.unserved` says why
    "qwen4_exp": qwen4_exp.declare,
    "qwen4_exp_text": qwen4_exp.declare,
}


def refuse_unserved(config: Any) -> None:
    """Raise CheckpointError, or Unserved, for the config of a model that kakera does not serve, before anything is
    downloaded or loaded."""
    if isinstance(config, dict) and config:
        spec_of(config)


def load_spec(directory: Path, *, planned: bool = False) -> ModelSpec:
    """Read `config.json` of a model directory, and the end tokens that stand beside it. `planned`, errors: as of
    `spec_of`."""
    path = directory / "config.json"
    refuse_file(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    refuse_directory(directory)
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: it is not a model directory")
    return spec_of(read_object(path), Beside.read(directory), planned=planned)


def spec_of(config: Mapping[str, Any], beside: Beside | None = None, *, planned: bool = False) -> ModelSpec:
    """`beside`: files that name end tokens, too. Raises CheckpointError for a model type or a format of weights that is
    not supported, a key that is missing, one that is not known, or a value that is not computed; Unserved for a model
    that can only be planned, unless it is to be `planned`."""
    try:
        keys = Config(config, beside)
        kind = keys.get("model_type")
        declare = ARCHITECTURES.get(kind) or PLANNED.get(kind)
        if declare is None:
            raise CheckpointError(f"model_type {kind!r} is not supported; kakera serves {', '.join(ARCHITECTURES)}")
        if kind in ARCHITECTURES:
            refuse_method(config)
        keys.refuse_others(COMMON)
        spec = declare(keys)
        _check(spec)
    except KeyError as error:
        raise CheckpointError(f"config.json lacks the key {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
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
