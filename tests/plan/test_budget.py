"""make_plan: the sums close, what fits is exactly what fits, and refusals name ways that really fit."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GB, cards, laptop

from kakera.arch.registry import spec_of
from kakera.arch.shard import of_rank
from kakera.arch.spec import ModelSpec
from kakera.errors import PlanRefused, UsageError
from kakera.plan.cautions import cautions
from kakera.plan.known import KNOWN
from kakera.plan.plan import Wishes, total_on
from kakera.plan.planner import make_plan
from kakera.plan.search import draft
from kakera.plan.share import plan_of_rank
from kakera.plan.sizes import left_over, margin
from kakera.plan.store_sizes import SEGMENT_BYTES, StoreSizes
from kakera.plan.weights import WeightBytes, from_config
from kakera.target.devices import parse_bytes, resolve


def wishes(**asked: object) -> Wishes:
    return Wishes(**{"gpus": "named", **asked})  # type: ignore[arg-type]


ALL_ASKED = {"chunk": 2048, "staging": 2, "embedding": "device"}  # nothing is left to choose


def test_27b_on_two_12_gb_cards_at_its_full_context(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    machine = cards(12, 12)
    plan = make_plan(spec_27b, wishes(context=262144), machine, weights_27b)
    rows = {row.name: row.bytes for row in plan.rows}
    assert rows["weights"] == weights_27b.of_rank(0, 2)
    assert rows["KV pages, one full request"] == 262144 * 8704 // 2  # 8.5 KiB a token, half of it on a card
    assert rows["recurrent states"] == 8 * 48 * (4 * 48 * 128 * 128 + 2 * 3 * 10240) // 2
    assert rows["KV windows and sinks"] == 8 * 7 * 64 * 32768 * 2 // 2  # six ring pages and one sink a slot
    # 8.1 GB, 0.17 that the attention kernels hold beside what is alive for one layer, and gaps of the allocator
    assert plan.total("device") - rows["KV pages, further"] == pytest.approx(8.48e9, abs=0.05e9)
    assert plan.total("device") <= 12 * GB - margin(12 * GB)
    assert (plan.context, plan.slots, plan.state_dtype, plan.kv.codec) == (262144, 8, "fp16", "int2")


def test_27b_takes_its_whole_context_without_being_asked(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    assert make_plan(spec_27b, wishes(), cards(12, 12), weights_27b).context == 262144


def test_27b_is_refused_on_one_8_gb_card(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    with pytest.raises(PlanRefused) as refused:
        make_plan(spec_27b, wishes(), cards(8), weights_27b)
    text = str(refused.value)
    assert refused.value.exit_status == 1
    assert "does not fit on 8GB" in text and "weights" in text and "--gpus 8GB,8GB" in text
    assert text.endswith("not served yet."), "two cards are named, and one is what can be served on"
    assert refused.value.details["fits"] is False
    assert len(refused.value.details["ways"]) == 3


def test_bf16_kv_is_refused_and_int2_is_the_first_way_out(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    with pytest.raises(PlanRefused) as refused:
        make_plan(spec_27b, wishes(context=262144, kv="bf16", max_running=1), cards(12, 12), weights_27b)
    ways = refused.value.details["ways"]
    assert [way["change"].split()[0] for way in ways[:2]] == ["--kv", "--context"]
    # 64 KiB a token in bf16 against 8.5 in int2, half of each on a card; windows and checkpoints cost a little of it
    kv = 262144 * (65536 - 8704) // 2
    assert kv - 0.1 * GB < ways[0]["device_bytes"] < kv


def test_advised_context_fits_and_the_next_page_does_not(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    asked = wishes(context=262144, kv="bf16", max_running=1, **ALL_ASKED)
    with pytest.raises(PlanRefused) as refused:
        make_plan(spec_27b, asked, cards(12, 12), weights_27b)
    change = next(w["change"] for w in refused.value.details["ways"] if w["change"].startswith("--context"))
    longest = int(change.split()[1])
    assert draft(spec_27b, replace(asked, context=longest), cards(12, 12), weights_27b).fits
    assert not draft(spec_27b, replace(asked, context=longest + 64), cards(12, 12), weights_27b).fits


def test_larger_card_of_the_advice_fits_and_one_gb_less_does_not(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    with pytest.raises(PlanRefused) as refused:
        make_plan(spec_27b, wishes(), cards(8), weights_27b)
    change = next(w["change"] for w in refused.value.details["ways"] if w["change"].startswith("a larger card"))
    size = int(change.rpartition(" ")[2].removesuffix("GB"))
    assert draft(spec_27b, wishes(), cards(size), weights_27b).fits
    assert not draft(spec_27b, wishes(), cards(size - 1), weights_27b).fits


def test_several_small_changes_are_advised_together(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    asked = wishes(context=200_000, max_running=16, chunk=8192)
    with pytest.raises(PlanRefused) as refused:
        make_plan(spec_27b, asked, cards(16.0), weights_27b)
    first = refused.value.details["ways"][0]
    assert (
        first["change"].startswith("--") and first["device_bytes"] >= refused.value.details["missing_bytes"]["device"]
    )


@pytest.mark.parametrize("cache", [40 * GB, 60 * GB, 400 * GB])
def test_a_store_that_the_host_has_no_room_for_is_made_smaller_before_it_is_given_up(
    spec_27b: ModelSpec, weights_27b: WeightBytes, cache: int
) -> None:
    with pytest.raises(PlanRefused) as refused:
        make_plan(spec_27b, wishes(host_cache=cache), cards(16), weights_27b)
    option, size = refused.value.details["ways"][0]["change"].split()
    assert option == "--host-cache" and parse_bytes(size) > 8 * GB
    make_plan(spec_27b, wishes(host_cache=parse_bytes(size)), cards(16), weights_27b)


def test_a_store_too_small_for_a_checkpoint_is_not_offered(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    """Half of this would fit, and hold nothing."""
    with pytest.raises(PlanRefused) as refused:
        make_plan(spec_27b, wishes(host_cache=180 * 10**6, max_running=1), cards(16, ram_gb=4.2), weights_27b)
    assert refused.value.details["ways"][0]["change"] == "--host-cache 0MiB"


def test_small_model_fits_laptops(spec_small: ModelSpec, weights_small: WeightBytes) -> None:
    large = make_plan(spec_small, wishes(), laptop(24), weights_small)
    small = make_plan(spec_small, wishes(), laptop(8, used_gb=5), weights_small)
    for plan, ram, used in ((large, 24 * GB, 2 * GB), (small, 8 * GB, 5 * GB)):
        assert plan.total("device") + plan.total("host") <= ram - used - margin(ram)
        assert (plan.context, plan.slots, plan.chunk, plan.state_dtype) == (32768, 8, 512, "fp32")
        assert plan.host_cache >= 20 * plan.checkpoint_bytes
    assert large.host_cache == 2 * 2**30
    assert small.host_cache < large.host_cache


def test_27b_on_a_laptop_names_cards_that_would_hold_it(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    with pytest.raises(PlanRefused, match="decoded at load") as refused:
        make_plan(spec_27b, wishes(), laptop(24), weights_27b)
    assert any("--gpus" in way["change"] for way in refused.value.details["ways"])


def test_a_part_of_the_memory_that_is_too_small_advises_the_least_part_that_is_not(
    spec_small: ModelSpec, weights_small: WeightBytes
) -> None:
    with pytest.raises(PlanRefused, match="in the memory of --gpus cpu:500MB") as refused:
        make_plan(spec_small, wishes(), resolve("cpu:500MB"), weights_small)
    (change,) = (w["change"] for w in refused.value.details["ways"] if w["change"].startswith("more memory"))
    size = int(re.fullmatch(r"more memory: --gpus cpu:(\d+)GB", change)[1])
    make_plan(spec_small, wishes(), resolve(f"cpu:{size}GB"), weights_small)
    with pytest.raises(PlanRefused):
        make_plan(spec_small, wishes(), resolve(f"cpu:{size - 1}GB"), weights_small)


def test_memory_of_other_processes_makes_the_plan_smaller(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    alone = make_plan(spec_27b, wishes(), cards(12, 12), weights_27b)
    shared = make_plan(spec_27b, wishes(), cards(12, 12, used=int(1.3 * GB)), weights_27b)
    assert shared.pages < alone.pages
    assert shared.total("device") + 1.3 * GB <= 12 * GB - margin(12 * GB)


def test_little_room_is_a_warning_and_none_a_refusal(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    asked = wishes(context=262144, max_running=1, **ALL_ASKED)
    need = draft(spec_27b, asked, cards(12, 12), weights_27b).need
    at_the_line = next(c for c in range(need, 2 * need, 2**20) if c - margin(c) >= need)
    at_the_line += 1  # sizes are given in GB, and a byte may be lost on the way
    tight, short = cards(at_the_line / GB, at_the_line / GB), cards(at_the_line / GB - 0.01, at_the_line / GB - 0.01)
    plan = make_plan(spec_27b, asked, tight, weights_27b)
    assert any("to spare" in line for line in cautions(plan, tight, asked))
    assert cautions(make_plan(spec_27b, asked, cards(14, 14), weights_27b), cards(14, 14), asked) == ()
    with pytest.raises(PlanRefused):
        make_plan(spec_27b, asked, short, weights_27b)


def test_smallest_card_decides(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    """The first of them has all logits, and so a little less room for pages."""
    alike, second, first = (
        draft(spec_27b, wishes(), cards(*sizes), weights_27b) for sizes in ((12, 12), (12, 24), (24, 12))
    )
    assert alike.plan.pages == second.plan.pages < first.plan.pages < 1.1 * alike.plan.pages


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_cards_differ_where_ranks_do_and_each_rank_has_its_own_plan(spec_27b, weights_27b, ranks) -> None:
    machine = cards(*[12] * ranks)
    plan = make_plan(spec_27b, wishes(context=196608), machine, weights_27b)
    differ = {row.name for row in plan.rows if row.cards}
    assert differ == {"weights", "activations and scratch", "gaps in torch's allocator"}
    assert all(row.bytes == max(row.cards) == row.cards[0] for row in plan.rows if row.cards)
    totals = [total_on(plan.rows, "device", card) for card in range(ranks)]
    assert plan.total("device") == totals[0] > totals[1]
    assert left_over(plan, machine) == 12 * GB - margin(12 * GB) - totals[0]
    for rank, total in enumerate(totals):
        own = plan_of_rank(plan, rank, ranks)
        assert (own.total("device"), own.ranks, own.device_names) == (total, 1, ("12GB",))
        assert own.spec == of_rank(spec_27b, rank, ranks) and own.pages == plan.pages
        assert ranks * own.page_bytes == plan.page_bytes and ranks * own.host_cache == plan.host_cache
        assert StoreSizes.of_plan(own) == StoreSizes.of_plan(plan)
    store = next(row.bytes for row in plan.rows if row.name == "prefix cache store")
    assert store == ranks * StoreSizes.of_plan(plan).pinned_bytes


def test_what_a_trellis_codes_is_planned_for_cards_that_can_cut_it(spec_27b: ModelSpec) -> None:
    """Four KV heads of 64 channels divide among four, and so do rows of the vocabulary; runs of 128 do not."""
    config = {**KNOWN["qwen3.8-27b"], "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    spec = spec_of(config)
    weights = from_config(spec, config)
    assert [ranks for ranks in range(1, 5) if weights.sharable(spec, ranks)] == [1, 2]
    assert from_config(spec, {**config, "quantization_config": None}).sharable(spec, 4)
    with pytest.raises(UsageError, match=r"4 cards can not share linears .* runs of 128 .* on 1, 2 cards"):
        make_plan(spec, wishes(), cards(24, 24, 24, 24), weights)
    assert len(make_plan(spec, wishes(gpus="auto"), cards(24, 24, 24, 24), weights).device_names) == 2


def test_auto_uses_as_many_cards_as_can_share_the_heads(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    plan = make_plan(spec_27b, wishes(gpus="auto"), cards(12, 12, 12), weights_27b)
    assert len(plan.device_names) == 2
    with pytest.raises(UsageError, match="3 cards can not share 4 KV heads"):
        make_plan(spec_27b, wishes(), cards(12, 12, 12), weights_27b)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"context": 300_000}, "262144"),
        ({"context": 0}, "--context"),
        ({"chunk": 100}, "multiple of 64"),
        ({"max_running": 0}, "--max-running"),
        ({"kv": "fp8"}, "fp32, bf16 or int2"),
        ({"kv_group": 96}, "power of two"),
        ({"kv_window": 100}, "multiple of 64"),
        ({"kv_window": 0}, "at least 64"),
        ({"kv_window": 64 * 10**18}, "at most 262144"),
        ({"chunk": 64 * 10**18}, "at most"),
        ({"max_running": 10**20}, "at most"),
        ({"state_dtype": "int8"}, "fp32 or fp16"),
        ({"host_cache": -1}, "--host-cache"),
    ],
)
def test_wrong_wish_is_refused_at_start(
    spec_27b: ModelSpec, weights_27b: WeightBytes, wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(spec_27b, wishes(**wrong), cards(12, 12), weights_27b)


@cache
def escha_27b() -> tuple[ModelSpec, WeightBytes]:
    spec = spec_of(KNOWN["qwen3.8-27b"])
    return spec, from_config(spec, KNOWN["qwen3.8-27b"])


@pytest.mark.slow
@settings(max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([8, 10, 12, 16, 24]), min_size=1, max_size=2),
    context=st.one_of(st.none(), st.integers(2, 262144)),
    running=st.one_of(st.none(), st.integers(1, 32)),
    kv=st.sampled_from(["int2", "bf16"]),
    cache=st.one_of(st.none(), st.integers(0, 40 * GB)),
)
def test_every_plan_fits_and_every_advised_option_makes_it_fit(
    sizes: list[int], context: int | None, running: int | None, kv: str, cache: int | None
) -> None:
    spec, weights = escha_27b()
    machine = cards(*sizes)
    asked = wishes(context=context, max_running=running, kv=kv, host_cache=cache)
    try:
        plan = make_plan(spec, asked, machine, weights)
    except PlanRefused as refused:
        missing, ways = refused.details["missing_bytes"], refused.details["ways"]
        assert missing["device"] or missing["host"]
        assert 1 <= len(ways) <= 3
        for place, bytes_missing in missing.items():  # elsewhere a way may cost some: more slots fit then
            assert not bytes_missing or all(way[f"{place}_bytes"] >= bytes_missing for way in ways)
        return
    for card, size in enumerate(sizes):
        assert total_on(plan.rows, "device", card) <= size * GB - margin(size * GB)
    assert plan.total("host") <= machine.ram - machine.ram_used - margin(machine.ram)
    assert plan.pages * 64 >= plan.context >= (context or 1)
    pages = sum(row.bytes for row in plan.rows if row.name.startswith("KV pages"))
    assert pages == plan.pages * plan.page_bytes // len(sizes)
    store = sum(row.bytes for row in plan.rows if row.name == "prefix cache store")
    assert store == plan.ranks * StoreSizes.of_plan(plan).pinned_bytes < plan.host_cache + plan.ranks * SEGMENT_BYTES
    assert cache is not None or store <= plan.host_cache
