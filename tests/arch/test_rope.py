"""RoPE as configs spell it: YaRN in every spelling, the context that follows, and what is refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from kakera.arch.registry import spec_of
from kakera.arch.rope import Yarn
from kakera.errors import CheckpointError
from kakera.plan.known import KNOWN

PLAIN = {key: value for key, value in KNOWN["qwen3.5-9b-bf16"].items() if key != "rope_parameters"}
THETA: dict[str, Any] = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 262_144}
FULL = {**THETA, **YARN, "rope_type": "yarn"}
TRAINED = "original_max_position_embeddings"


def declared(**rope: Any):
    return spec_of({**PLAIN, **rope})


SPELLINGS: list[dict[str, Any]] = [
    {"rope_parameters": FULL},
    {"rope_parameters": {**FULL, "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
    {"rope_parameters": {**THETA, **YARN, "type": "yarn"}},
    {"rope_parameters": THETA, "rope_scaling": {**YARN, "type": "yarn"}},
    {"rope_parameters": {**THETA, "rope_type": "default"}, "rope_scaling": {**YARN, "rope_type": "yarn"}},
    {"rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "rope_scaling": {**YARN, "rope_type": "yarn"}},
    {"rope_theta": 1e7, "rope_scaling": {"factor": 4, "type": "yarn", "rope_type": "yarn", TRAINED: 262_144}},
    {"rope_parameters": {**FULL, TRAINED: None}},  # trained on what the config says
    {"rope_parameters": {**FULL, TRAINED: None}, TRAINED: 262_144},
    {"rope_parameters": {"full_attention": FULL, "linear_attention": None}},
    {"rope_parameters": {**FULL, "factor": None}, "max_position_embeddings": 1_048_576},
    {"rope_parameters": {**FULL, "beta_fast": None, "beta_slow": 1, "attention_factor": None, "truncate": True}},
    {"text_config": {"rope_parameters": FULL}},
]


@pytest.mark.parametrize("config", SPELLINGS, ids=range(len(SPELLINGS)))
def test_yarn_in_every_spelling_is_the_same_and_stretches_the_context(config):
    spec = declared(**config)
    assert spec.attention.yarn == Yarn(factor=4.0, low=14, high=22, scale=1.138629436111989)
    assert (spec.rope_theta, spec.rotary_dim, spec.max_positions) == (1e7, 64, 1_048_576)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": THETA},
        {"rope_parameters": {**THETA, "rope_type": "default", "factor": 4.0}},  # as transformers: the type decides
        {"rope_parameters": {**THETA, "rope_type": "mrope", "type": "default", "mrope_section": [11, 11, 10]}},
        {"rope_theta": 1e7, "rope_scaling": None},
        {"rope_theta": 1e7, "rope_scaling": {}, "rope_parameters": None},
    ],
    ids=str,
)
def test_without_yarn_positions_are_as_they_were(config):
    spec = declared(**config)
    assert (spec.attention.yarn, spec.rope_theta, spec.max_positions) == (None, 1e7, 262_144)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "rope_type 'linear' is not computed by kakera; it computes default"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 3}, "rope_type 'dynamic'"),
        ({"rope_type": "llama3", "low_freq_factor": 1.0}, "rope_type 'llama3'"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope_type 'longrope'"),
        ({"rope_type": "proportional"}, "rope_type 'proportional'"),
        ({"rope_type": ["yarn"]}, r"rope_type \['yarn'\]"),
        ({"type": "su", **YARN}, "rope_type 'su'"),
        (YARN, "rope_parameters has factor, original_max_position_embeddings and no rope_type"),
        ({"rope_type": "yarn", "type": "linear"}, "its type is 'yarn' and 'linear'"),
        ({**FULL, "factor": 0.5}, "a factor of at least 1"),
        ({**FULL, "factor": "4"}, "factor is '4'"),
        ({**FULL, "factor": float("inf")}, "factor is inf"),
        ({**FULL, "factor": 1e300}, "is beyond"),
        ({**FULL, TRAINED: -1}, "which is no number of tokens"),
        ({**FULL, TRAINED: 1e5}, "which is no number of tokens"),
        ({**FULL, "attention_factor": -1}, "attention_factor is -1"),
        ({**FULL, "beta_fast": "x"}, "beta_fast is 'x'"),
        ({**FULL, "factor": None}, "a factor of at least 1"),
        ({**FULL, "ntk_by_parts": 2}, "ntk_by_parts of rope_parameters is not known"),
        ({"rope_type": float("nan")}, "a value has the wrong type"),
        ({"rope_theta": 10**400}, "rope_theta is 1000|a value has the wrong type"),
        ({"partial_rotary_factor": 1e308}, "a value has the wrong type"),
        ({**FULL, "beta_fast": 1e-308, TRAINED: 2**28, "factor": 1.0}, "a value has the wrong type"),
        ("yarn", "rope_parameters is 'yarn', which is no JSON object"),
        ([FULL], "which is no JSON object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_other_ways_to_stretch_are_refused_in_words(rope, words):
    config = {**THETA, **rope} if isinstance(rope, dict) else rope
    for changes in ({"rope_parameters": config}, {"rope_theta": 1e7, "rope_scaling": config}):
        with pytest.raises(CheckpointError, match=words.replace("rope_parameters", "rope_(parameters|scaling)")):
            declared(**changes)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "says rope_theta neither in rope_parameters nor beside"),
        ({"rope_parameters": {"rope_theta": None}}, "says rope_theta neither"),
        ({"rope_parameters": FULL, "rope_scaling": {**YARN, "type": "yarn", "factor": 2.0}}, "factor is 4.0 and 2.0"),
        ({"rope_parameters": FULL, "rope_scaling": {"type": "linear"}}, "rope_type is 'yarn' and 'linear'"),
        ({"rope_parameters": FULL, TRAINED: 8192}, "262144 in rope_parameters, 8192 beside"),
    ],
    ids=str,
)
def test_what_is_missing_or_said_twice_is_refused_in_words(config, words):
    with pytest.raises(CheckpointError, match=words):
        declared(**config)
