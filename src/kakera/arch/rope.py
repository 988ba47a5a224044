"""How a config turns positions into angles: RoPE's base, its share of a head, and YaRN. No torch.

YaRN stretches a model to `factor` times the context that it was trained on. Channels that turn often within that keep
their angle, those that hardly turn are slowed by `factor`, those between are blended; cos and sin are scaled. As in
transformers' modeling_rope_utils. Sections of three-dimensional positions matter to images only: a text token's three
positions are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kakera.arch.config import LARGEST, Config, positive, short
from kakera.errors import CheckpointError

TRAINED = "original_max_position_embeddings"
PLAIN = ("default", "mrope")
STRETCHING = ("factor", TRAINED, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", *STRETCHING)


@dataclass(frozen=True)
class Yarn:
    """Of the pairs of channels that turn, those up to `low` keep their angle and those from `high` are slowed by
    `factor`; `scale` of cos and sin."""

    factor: float
    low: float
    high: float
    scale: float


def rotary_dim(config: Config, head_dim: int, share: float) -> int:
    """Channels of a head that turn; `share` of them where the config does not say."""
    return int(head_dim * positive("partial_rotary_factor", _stated(config, "partial_rotary_factor", share)))


def theta(config: Config) -> float:
    """Raises CheckpointError if the config does not say: implementations differ in what they take then."""
    found = _stated(config, "rope_theta")
    if found is None:
        raise CheckpointError("config.json says rope_theta neither in rope_parameters nor beside them; add it there")
    return positive("rope_theta", found)


def max_positions(config: Config) -> int:
    """Tokens that the model is made for: what it was trained on times the factor, if it is stretched."""
    stated = config.size("max_position_embeddings")
    if _kind(config) in PLAIN:
        return stated
    factor, trained = _stretch(config)
    if (stretched := factor * trained) > LARGEST:
        raise CheckpointError(f"config.json: YaRN's factor {factor:g} of {trained} tokens is beyond {LARGEST}")
    return int(stretched)


def axes(config: Config, pairs: int) -> tuple[int, ...]:
    """Which of a token's three positions (0 time, 1 row, 2 column) turns each of so many pairs of channels.

    Rows turn the pairs 1, 4, 7, ... and columns 2, 5, 8, ..., as many as their section says; time turns the others.
    Raises CheckpointError for sections that are no three numbers.
    """
    sections = _parameters(config).get("mrope_section") or [11, 11, 10]
    if not (isinstance(sections, list) and len(sections) == 3 and all(type(size) is int for size in sections)):
        raise CheckpointError(f"config.json: mrope_section is {short(sections)}, which is no list of three numbers")
    turns = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            turns[pair] = axis
    return tuple(turns)


def yarn_of(config: Config, dim: int, base: float) -> Yarn | None:
    """Of `dim` channels that turn on the base `base`. Raises CheckpointError for another kind of stretching."""
    if (kind := _kind(config)) in PLAIN:
        return None
    if kind != "yarn":
        raise CheckpointError(
            f"config.json: rope_type {short(kind)} is not computed by kakera; it computes default and yarn"
        )
    found, (factor, trained) = _parameters(config), _stretch(config)
    fast = positive("beta_fast", found.get("beta_fast") or 32)
    slow = positive("beta_slow", found.get("beta_slow") or 1)
    low, high = (dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    if found.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return Yarn(factor, max(low, 0), min(high, dim - 1), _scale(found, factor))


def _scale(found: dict[str, Any], factor: float) -> float:
    if found.get("attention_factor") is not None:
        return positive("attention_factor", found["attention_factor"])
    if found.get("mscale") and found.get("mscale_all_dim"):
        upper, lower = (positive(key, found[key]) for key in ("mscale", "mscale_all_dim"))
        return _grown(factor, upper) / _grown(factor, lower)
    return _grown(factor, 1.0)


def _grown(factor: float, by: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0


def _stretch(config: Config) -> tuple[float, int]:
    """Factor, and tokens of training."""
    whole, found = config.size("max_position_embeddings"), _parameters(config)
    within, beside = found.get(TRAINED), config.get(TRAINED)
    if within is not None and beside is not None and within != beside:
        raise CheckpointError(f"config.json: {TRAINED} is {short(within)} in rope_parameters, {short(beside)} beside")
    trained = within or beside or whole
    if not isinstance(trained, int) or not 0 < trained <= LARGEST or isinstance(trained, bool):
        raise CheckpointError(f"config.json: {TRAINED} is {short(trained)}, which is no number of tokens")
    factor = positive("factor", whole / trained if found.get("factor") is None else found["factor"])
    if factor < 1 or (factor == 1 and found.get("factor") is None):
        raise CheckpointError(f"config.json: YaRN stretches {trained} tokens; give it a factor of at least 1")
    return factor, trained


def _stated(config: Config, key: str, default: Any = None) -> Any:
    """Of rope_parameters, or beside them as older files have it. Raises CheckpointError if the two contradict."""
    found, beside = _parameters(config).get(key), config.get(key)
    if found is not None and beside is not None and found != beside:
        raise CheckpointError(f"config.json: {key} is {short(found)} in rope_parameters, {short(beside)} beside")
    return next((value for value in (found, beside) if value is not None), default)


def _kind(config: Config) -> Any:
    return _parameters(config).get("rope_type", PLAIN[0])


def _parameters(config: Config) -> dict[str, Any]:
    """`rope_parameters` and, older, `rope_scaling`, which may add to them and not contradict; with a `rope_type` if it
    is none of PLAIN. Raises CheckpointError for a key that is not known."""
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        for key, value in _part(name, config.get(name) or {}).items():
            if found.setdefault(key, value) != value:
                raise CheckpointError(
                    f"config.json: rope_parameters and rope_scaling say {key} is {short(found[key])} and {short(value)}"
                )
    return found


def _part(name: str, said: Any) -> dict[str, Any]:
    if isinstance(said, dict) and isinstance(said.get("full_attention"), dict):  # by the kind of layer
        said = said["full_attention"]
    if not isinstance(said, dict):
        raise CheckpointError(f"config.json: {name} is {short(said)}, which is no JSON object")
    held = {key: value for key, value in said.items() if value is not None or key == "truncate"}
    kinds = [PLAIN[0] if kind in PLAIN else kind for key in ("rope_type", "type") if (kind := held.pop(key, None))]
    if any(kind != kinds[0] for kind in kinds):
        raise CheckpointError(f"config.json: {name} says that its type is {short(kinds[0])} and {short(kinds[1])}")
    kind = kinds[0] if kinds else None
    if kind not in (None, *PLAIN, "yarn"):  # its other keys are its own
        return {"rope_type": kind, **{key: held[key] for key in KEYS[:2] if key in held}}
    if unknown := sorted(key for key, value in held.items() if key not in KEYS and value):
        raise CheckpointError(f"config.json: {', '.join(unknown)} of {name} is not known")
    if kind is None and (stretching := [key for key in STRETCHING if held.get(key)]):
        raise CheckpointError(f"config.json: {name} has {', '.join(stretching)} and no rope_type; say yarn or default")
    if kind == "yarn":
        return {**held, "rope_type": kind}
    return {key: value for key, value in held.items() if key not in STRETCHING}
