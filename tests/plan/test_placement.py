"""Weights that may lie apart: experts on cards and on the host, a table on the host or in its file; and the words of a
plan that has no room for them. The model is Qwen3.8-Flash-Next in its smallest EXL3 build."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import cards, laptop

from kakera.arch.registry import spec_of
from kakera.arch.spec import ModelSpec
from kakera.arch.tensors import WHOLE
from kakera.errors import PlanRefused
from kakera.plan.cautions import cautions
from kakera.plan.known import KNOWN
from kakera.plan.placement import place
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.plan.search import draft
from kakera.plan.speed import predict
from kakera.plan.table import read_line, to_json
from kakera.plan.weights import Part, WeightBytes, from_config
from kakera.target.devices import Machine
from kakera.target.target import CUDA

CONFIG = KNOWN["qwen3.8-flash-next"]
EXPERTS, EMBEDDING, TABLE = 30_670_848_000, 248320 * 2560 * 2, 320_001_536 * 82


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_of(CONFIG, planned=True)


@pytest.fixture(scope="module")
def weights(spec: ModelSpec) -> WeightBytes:
    return from_config(spec, CONFIG)


def rows(plan: Plan, name: str) -> dict[str, int]:
    return {row.place: row.bytes for row in plan.rows if row.name == name}


def note(plan: Plan, name: str, place: str) -> str:
    return next(row.note for row in plan.rows if (row.name, row.place) == (name, place))


def fast(machine: Machine) -> Machine:
    return replace(machine, devices=tuple(replace(device, bandwidth=672e9) for device in machine.devices))


def test_what_is_resident_whatever_is_placed(weights):
    assert weights.coded == pytest.approx(3.3e9, rel=0.03)
    assert {part.name: (part.bytes, part.units, part.taken) for part in weights.parts} == {
        "experts": (EXPERTS, 512, 10),
        "embedding": (EMBEDDING, 1, 1),
        "n-gram table": (TABLE, 1, 16),
    }
    reads = {part.name: part.read for part in weights.parts}
    assert reads == {"experts": 599_040_000, "embedding": 5120, "n-gram table": 16 * 82}
    hyper_connections = 640_624_640 * 2  # every card has all of them
    assert hyper_connections < weights.replicated < hyper_connections + 0.25e9


def test_a_12_gb_card_takes_a_full_context_and_98_of_512_experts(spec, weights):
    """6.3 GB for everything else, by the arithmetic of the model's description."""
    machine = fast(cards(12.82, ram_gb=64))  # what the driver of a 12 GB card reports
    plan = make_plan(spec, Wishes(max_running=2), machine, weights)
    assert plan.context == 262_144 and plan.page_bytes == 258_048
    taken = plan.total("device") - rows(plan, "experts")["device"]
    assert taken == pytest.approx(6.3e9, rel=0.03)
    assert note(plan, "experts", "device").startswith("98 of 512 in every layer; a token takes 10, reads 115 MB here")
    assert rows(plan, "experts")["host"] == EXPERTS and "all 512, pinned" in note(plan, "experts", "host")
    assert rows(plan, "embedding") == {"host": EMBEDDING}
    assert rows(plan, "n-gram table") == {"host": 0}
    assert note(plan, "n-gram table", "host") == "26.24 GB stay in the file; a token reads 16 rows"
    assert cautions(plan, machine, Wishes(max_running=2)) == ()


def test_what_is_resident_and_what_a_token_reads_are_told_apart(spec, weights):
    machine = fast(cards(12.82, ram_gb=64))
    plan = make_plan(spec, Wishes(max_running=2), machine, weights)
    speed = predict(plan, machine, weights)
    assert speed.read_on_device + speed.read_on_host == pytest.approx(3.9e9, rel=0.02)
    assert speed.read_on_host == pytest.approx(599e6 * 414 / 512, rel=0.001)
    assert (
        read_line(speed, plan) == "Of 41.09 GB of weights a token reads 3.39 GB on each card and 0.48 GB from the host."
    )
    assert to_json(plan, machine, speed)["estimated_speed"]["read_on_host"] == speed.read_on_host
    alone = predict(plan, fast(cards(48)), weights)
    assert speed.decode_short == pytest.approx(34, rel=0.05) and alone.decode_short == speed.decode_short
    at_full = speed.decode_full / speed.decode_short
    assert at_full > 0.95  # 207 MB of block keys and chosen tokens, not 1.06 GB of pages


def test_a_selector_reads_block_keys_and_few_tokens(spec):
    kv = make_plan(spec, Wishes(), cards(48, ram_gb=64), from_config(spec, CONFIG)).kv
    assert kv.read_bytes(spec, 262_144) == 262_144 * 768 + 2051 * 3264
    assert kv.read_bytes(spec, 2000) == 2000 * kv.token_bytes(spec)


def test_a_card_with_room_takes_all_experts_and_the_embedding_but_no_table(spec, weights):
    plan = make_plan(spec, Wishes(max_running=2), cards(48, ram_gb=64), weights)
    assert rows(plan, "experts") == {"device": EXPERTS} and rows(plan, "embedding") == {"device": EMBEDDING}
    assert rows(plan, "n-gram table") == {"host": TABLE}


def test_a_host_without_room_for_all_keeps_what_the_card_lacks(spec, weights):
    plan = make_plan(spec, Wishes(), cards(24, ram_gb=32), weights)
    held = rows(plan, "experts")
    assert held["device"] + held["host"] == pytest.approx(EXPERTS, abs=1e6)
    assert "the other" in note(plan, "experts", "host")


def test_more_memory_of_the_host_never_makes_it_not_fit(spec, weights):
    """Where all experts have just room there, the embedding must have some, too."""
    fits = [draft(spec, Wishes(context=32_768), cards(15, ram_gb=ram / 2), weights).fits for ram in range(54, 80)]
    assert fits == sorted(fits) and len(set(fits)) == 2


def test_two_cards_hold_three_of_five_blocks_of_an_expert_at_most(spec, weights):
    plan = make_plan(spec, Wishes(max_running=2), cards(12.8, 12.8, ram_gb=64), weights)
    (experts,) = [placed for placed in plan.placed if placed.part.name == "experts"]
    vectors = 3 * 2 * 2560 / 1_248_000  # of an expert: on both cards those of gate's and up's inputs, of down's outputs
    share = 0.6 * (1 - vectors) + vectors
    assert experts.device == pytest.approx(share * EXPERTS * experts.units / 512, rel=0.0001)
    assert rows(plan, "weights")["device"] > 1.27e9 + weights.coded / 2 - 0.7e9  # hyper-connections on both


def test_no_host_for_the_experts_is_refused_with_ways_that_fit(spec, weights):
    with pytest.raises(PlanRefused, match="does not fit in the host's memory") as refused:
        make_plan(spec, Wishes(), cards(12.8, ram_gb=16), weights)
    ways = [way["change"] for way in refused.value.details["ways"]]
    assert ways == ["a machine with at least 30 GB of memory", "a larger card: --gpus 28GB"]
    assert make_plan(spec, Wishes(), cards(12.8, ram_gb=30), weights)
    assert make_plan(spec, Wishes(), cards(28, ram_gb=16), weights)


def test_a_card_too_small_for_the_rest_is_refused_with_three_ways(spec, weights):
    with pytest.raises(PlanRefused, match="does not fit on 6GB") as refused:
        make_plan(spec, Wishes(context=262_144), cards(6, ram_gb=64), weights)
    ways = [way["change"] for way in refused.value.details["ways"]]
    assert ways == ["--context 196544", "a larger card: --gpus 7GB", "2 cards: --gpus 6GB,6GB"]


def test_a_cpu_would_decode_all_experts_and_leaves_the_table_in_its_file(spec, weights):
    with pytest.raises(PlanRefused, match="does not fit in this machine's memory") as refused:
        make_plan(spec, Wishes(), laptop(64), weights)
    assert "26.24 GB stay in the file" in str(refused.value) and len(refused.value.details["ways"]) == 3


def test_what_is_read_most_goes_to_the_card_first():
    def part(name: str, read: int, places=("device", "host")) -> Part:
        return Part(name, places, ((WHOLE, 10),), 10, 1, 1, read)

    parts = [part(name, read) for name, read in (("rarely", 1), ("often", 5))]
    placed = place(parts, CUDA, 1, room=10, host_room=100)
    assert [(p.part.name, p.device, p.host) for p in placed] == [("often", 10, 0), ("rarely", 0, 10)]
