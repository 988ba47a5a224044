"""Prompts with images on a GPU: by graphs as by single launches, hits as cold runs, beside text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_world import ask, tokens_of

from kakera.contract.request import Request
from kakera.plan.plan import Wishes
from kakera.plan.planner import plan_for
from kakera.run.build import build_engine
from kakera.run.engine import LocalEngine
from kakera.run.generate import generate
from seeing_model import picture, prompt_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
NEAR = 0.25  # nats: tiny random logits in bf16


def engine(directory: Path, place: str) -> LocalEngine:
    wishes = Wishes(gpus="auto", context=1024, max_running=4, kv_group=32, kv_window=128, host_cache=512 * 2**20)
    return build_engine(directory, plan_for(directory, replace(wishes, vision=place, image_tokens=256)))


def requests(prefix: str) -> list[Request]:
    found = []
    for i, parts in enumerate(
        (
            (tokens_of(1, 70), picture(1, 9, 20), tokens_of(2, 30)),
            (tokens_of(3, 100),),
            (picture(2, 4, 5), tokens_of(4, 64), picture(1, 9, 20), tokens_of(5, 20)),
        )
    ):
        tokens, images = prompt_of(*parts)
        found.append(replace(ask(f"{prefix}{i}", tokens, 40), images=images))
    return found


@pytest.mark.parametrize("place", ["device", "host"])
def test_graphs_hits_and_batches_of_prompts_with_images(seeing_model, place):
    of = engine(seeing_model, place)
    cold = list(generate(of, requests("cold ")).values())
    encoded = of.stats().counters["images_encoded"]
    warm = list(generate(of, requests("warm ")).values())
    assert of.stats().counters["images_encoded"] == encoded == 2
    assert all(each.finished.usage.cached_tokens > 0 for each in warm)
    graphs, of.runner.graphs = of.runner.graphs, None
    of.flush()
    alone = [next(iter(generate(of, [request]).values())) for request in requests("alone ")]
    assert graphs is None or graphs.rows == 4
    for one, *others in zip(cold, warm, alone, strict=True):
        for other in others:  # the first token at least is no matter of rounding behind rounding
            assert one.tokens[0] == other.tokens[0] or abs(one.logprobs[0].logprob - other.logprobs[0].logprob) < NEAR
            assert abs(one.logprobs[0].logprob - other.logprobs[0].logprob) < NEAR
