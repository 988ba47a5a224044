"""Plans of a mixture of experts: what cards hold, what steps of one and of many tokens read, who can share it."""

from __future__ import annotations

import pytest
from machines import cards, laptop

from kakera.arch.registry import spec_of
from kakera.errors import UsageError
from kakera.plan.known import KNOWN
from kakera.plan.plan import Wishes
from kakera.plan.planner import make_plan
from kakera.plan.speed import predict
from kakera.plan.weights import from_config
from kakera.target.devices import resolve

CONFIG = KNOWN["qwen3.6-35b-a3b"]
SPEC, WEIGHTS = spec_of(CONFIG), from_config(spec_of(CONFIG), CONFIG)


def test_a_16_gb_card_holds_it_whole_and_two_of_12_gb_half_of_every_expert():
    (part,) = WEIGHTS.parts
    for machine, shares in ((cards(16.3), 1), (cards(12.8, 12.8), 2)):
        plan = make_plan(SPEC, Wishes(gpus="named", context=262144), machine, WEIGHTS)
        (placed,) = plan.placed
        assert (placed.units, placed.host) == (256, 0)
        # of gate_up the scales of inputs, of down those of outputs, two and four bytes each
        both = 40 * 256 * 2 * 2048 * 6
        assert placed.device == pytest.approx(both + (part.bytes - both) / shares, rel=1e-4)
        assert plan.slots == 8


def test_a_12_gb_card_keeps_the_experts_that_do_not_fit_on_the_host():
    wishes = Wishes(gpus="named", context=65536, max_running=2)
    (placed,) = make_plan(SPEC, wishes, cards(12.8, ram_gb=32), WEIGHTS).placed
    assert 128 < placed.units < 256 and placed.host


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8.0), (4, 30.5), (8, 57.4), (32, 163), (128, 252)])
def test_tokens_of_a_step_read_the_experts_that_one_of_them_chose(tokens, experts):
    """Figures: E (1 - (1 - k / E) ^ M)."""
    (placed,) = make_plan(SPEC, Wishes(gpus="named"), cards(143.8), WEIGHTS).placed
    assert placed.read_by(tokens) / (placed.device / 256) == pytest.approx(experts, rel=0.01)
    assert placed.read_by(1) == pytest.approx(placed.read_on_device, rel=1e-6)


def test_speeds_count_what_is_read():
    machine = resolve("h200")
    plan = make_plan(SPEC, Wishes(gpus="named", context=4096, max_running=8), machine, WEIGHTS)
    speed = predict(plan, machine, WEIGHTS)
    assert speed.read_on_device == pytest.approx(2.27e9, rel=0.01)  # of 12.2 GB
    assert speed.decode_short and speed.together and speed.prefill
    assert 3 < speed.together / speed.decode_short < 5  # 8 tokens read 4.1 GB and eight states
    longer = make_plan(SPEC, Wishes(gpus="named", context=16384, chunk=8192, max_running=1), machine, WEIGHTS)
    assert predict(longer, machine, WEIGHTS).prefill > 1.5 * speed.prefill  # all experts are decoded once a chunk


def test_processes_share_experts_by_blocks_of_128_and_the_words_name_what_can_not_be_shared():
    small = {**CONFIG, "num_hidden_layers": 4, "num_experts": 8, "vocab_size": 1024, "quantization_config": None}
    spec = spec_of(small)
    assert make_plan(spec, Wishes(gpus="cpu,cpu"), resolve("cpu,cpu"), from_config(spec, small)).ranks == 2
    spec = spec_of({**small, "moe_intermediate_size": 128})
    with pytest.raises(UsageError, match=r"can not share experts.gate_up_proj, which is cut in runs of 128"):
        make_plan(spec, Wishes(gpus="cpu,cpu"), resolve("cpu,cpu"), from_config(spec, small))
    assert make_plan(spec, Wishes(gpus="cpu"), laptop(32), from_config(spec, small)).ranks == 1
