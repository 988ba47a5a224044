"""A mixture of experts in the engine: a hit is cold, to the bit, and company changes no answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_world import World, ask, equal, logprob_gap, tokens_of

from random_model import write_config

MOE = {
    "model_type": "qwen3_5_moe_text",
    "intermediate_size": None,
    "vocab_size": 384,
    "head_dim": 64,
    "hidden_size": 64,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "quantization_config": None,
    "random_weights": 11,
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("experts"), **MOE)


def test_the_second_identical_request_equals_the_first_bit_for_bit(experts):
    world = World.build(experts).watch()
    for n in (65, 127, 257, 383):
        cold, warm = (world.one(ask(f"{kind} {n}", tokens_of(n, n), 3)) for kind in ("cold", "warm"))
        assert (cold.finished.usage.cached_tokens, warm.finished.usage.cached_tokens) == (0, (n - 1) // 64 * 64)
        assert equal(world.seen[f"cold {n}"], world.seen[f"warm {n}"]), n
        assert warm.tokens == cold.tokens
    world.check_idle()


def test_answers_are_those_of_requests_alone_whoever_is_beside_them(experts):
    requests = [ask(f"r{i}", tokens_of(40 + i, 70 + 40 * i), 8) for i in range(4)]
    together = World.build(experts).answer(*requests)
    for request, answer in zip(requests, together, strict=True):
        alone = World.build(experts).one(request)
        assert alone.tokens == answer.tokens and logprob_gap(alone, answer) < 1e-4
