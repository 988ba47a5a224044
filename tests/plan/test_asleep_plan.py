"""What a sleep takes of the host, and what of the card's pages finds room there."""

from __future__ import annotations

import json

from machines import GB, cards, laptop

from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.plan.asleep import Asleep, asleep_bytes
from kakera.plan.plan import Wishes
from kakera.plan.planner import make_plan
from kakera.plan.speed import predict
from kakera.plan.weights import WeightBytes
from kakera.service.limits import bounds, host_bytes


def test_level_1_keeps_weights_windows_and_scratch(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    machine = cards(12, ram_gb=64)
    plan = make_plan(spec_27b, Wishes(), machine, weights_27b)
    asleep = Asleep.of(plan, machine)
    rows = {row.name: row.bytes for row in plan.rows if row.place == "device"}
    weights, pages = rows["weights"], rows["KV pages, one full request"]
    assert weights < asleep.level_1_bytes == asleep_bytes(plan) < plan.total("device") - pages
    assert asleep.tokens == asleep.pool_tokens == plan.pages * PAGE and "find room" not in asleep.text
    assert f"{asleep.level_1_bytes / 1e9:.2f} GB in host memory" in asleep.text
    assert 64 * GB - plan.total("host") > asleep.free_bytes > 30 * GB
    assert json.loads(json.dumps(asleep.to_json()))["level_1_bytes"] == asleep.level_1_bytes
    assert asleep_bytes(make_plan(spec_27b, Wishes(), cards(12, 12), weights_27b)) > weights  # on both cards together


def test_a_small_prefix_cache_holds_less_than_the_card(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    machine = cards(12, ram_gb=64)
    found = []
    for host_cache in (0, 2**29, 2**31):
        plan = make_plan(spec_27b, Wishes(host_cache=host_cache), machine, weights_27b)
        found.append(Asleep.of(plan, machine))
    assert found[0].tokens == 0 < found[1].tokens < found[1].pool_tokens and found[2].tokens == found[2].pool_tokens
    assert [f"{each.tokens} find room" in each.text for each in found] == [True, True, False]


def test_on_a_cpu_level_1_moves_nothing(spec_small: ModelSpec, weights_small: WeightBytes) -> None:
    machine = laptop(24)
    plan = make_plan(spec_small, Wishes(gpus="cpu"), machine, weights_small)
    asleep = Asleep.of(plan, machine)
    assert asleep.level_1_bytes == 0 and "where they are" in asleep.text


def test_a_service_may_sleep_within_its_bounds(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    machine = cards(12, ram_gb=64)
    plan = make_plan(spec_27b, Wishes(), machine, weights_27b)
    speed = predict(plan, machine, weights_27b)
    assert bounds(plan, speed, 10**10).memory_high > host_bytes(plan) + asleep_bytes(plan)
