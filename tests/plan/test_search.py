"""What kakera chooses by itself: the figures that it was built for, and properties of the order of preference."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import GB, cards, laptop

from kakera.arch.registry import spec_of
from kakera.arch.spec import ModelSpec
from kakera.errors import PlanRefused, UsageError
from kakera.plan.budget import Case, Draft
from kakera.plan.cautions import cautions, uneven
from kakera.plan.costs import costs
from kakera.plan.known import KNOWN
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import beside_wsl, make_plan
from kakera.plan.search import ENOUGH, admits, choices, draft, preference
from kakera.plan.sizes import left_over, margin
from kakera.plan.speed import predict
from kakera.plan.table import as_text, to_json
from kakera.plan.weights import WeightBytes, from_config
from kakera.target import devices
from kakera.target.devices import Machine, resolve

ESCHA = "qwen3.8-27b"


@cache
def model(name: str) -> tuple[ModelSpec, WeightBytes]:
    spec = spec_of(KNOWN[name])
    return spec, from_config(spec, KNOWN[name])


def machine_of(gpus: str) -> Machine:
    """Named cards in a machine with 32 GB, on Linux."""
    return replace(resolve(gpus), ram=32 * GB, ram_used=2 * GB, reserve=0)


def planned(gpus: str, name: str = ESCHA, **asked: object) -> Plan:
    spec, weights = model(name)
    return make_plan(spec, Wishes(**{"gpus": gpus, **asked}), machine_of(gpus), weights)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "name", "asked", "context"),
    [
        ("rtx5070", ESCHA, {"max_running": 1}, 186_000),
        ("rtx5070", ESCHA, {"max_running": 1, "reserve": GB}, 71_000),
        ("12GB", ESCHA, {"max_running": 1}, 95_000),
        ("rtx3060", ESCHA, {"max_running": 1}, 193_000),
        ("16GB", ESCHA, {"max_running": 4}, 262_144),
        *[
            (f"rtx{n}", f"{ESCHA}-exl3-4.0bpw", {"max_running": 1}, 146_000)
            for n in ("5060ti", "5070ti", "5080", "4080")
        ],
        ("rtx5070", f"{ESCHA}-exl3-2.5bpw", {"max_running": 1}, 197_000),
    ],
)
def test_the_figures_it_was_built_for(gpus: str, name: str, asked: dict[str, int], context: int) -> None:
    """Chosen by itself, within the card less its margin and what is reserved, and without a warning."""
    plan = planned(gpus, name, **asked)
    machine = machine_of(gpus)
    assert plan.context >= context
    assert plan.total("device") <= machine.devices[0].bytes - margin(machine.devices[0].bytes) - asked.get("reserve", 0)
    assert cautions(plan, machine, Wishes(gpus=gpus, **asked)) == ()


def test_rows_yield_to_context_and_are_had_where_pages_serve_them() -> None:
    assert [(planned(g).context, planned(g).slots) for g in ("16GB", "rtx3090")] == [(262_144, 4), (262_144, 8)]
    assert planned("rtx5070").slots == 1 and planned("rtx5070", context=32_768).slots > 1
    assert planned("rtx5070", context=16_384).slots == 4


def test_only_a_plan_that_was_asked_for_is_told_to_be_tight() -> None:
    """Half and whole wishes, by what is left; the words name what was given."""
    for asked, words in (
        ({}, None),
        ({"context": 65_536}, None),
        ({"max_running": 1}, None),
        ({"context": 192_000, "max_running": 1}, "lower --context"),
        ({"context": 65_536, "pool": 192_000, "max_running": 1}, "lower --context or --pool"),
        ({"context": 100_000, "max_running": 1}, None),
    ):
        wishes = Wishes(gpus="rtx5070", **asked)
        found = cautions(planned("rtx5070", **asked), machine_of("rtx5070"), wishes)
        assert [line.endswith(str(words)) for line in found] == [True] * (words is not None), found


def test_what_was_asked_for_is_heard() -> None:
    asked = {
        "max_running": 3,
        "chunk": 512,
        "staging": 2,
        "state_dtype": "fp32",
        "embedding": "device",
        "context": 8192,
    }
    plan = planned("16GB", **asked, pool=100_000, reserve=GB)
    found = (plan.slots, plan.chunk, plan.staged, plan.state_dtype, plan.embedding, plan.context)
    assert found == tuple(asked.values()) and plan.pages == -(-100_000 // 64) and plan.reserve == GB
    assert make_plan(plan.spec, replace(plan.wishes(), pool=100_000), machine_of("16GB"), model(ESCHA)[1]) == plan


def test_embedding_on_the_host_moves_its_bytes_and_leaves_the_rest() -> None:
    asked = {"max_running": 1, "chunk": 2048, "staging": 2, "context": 8192}
    device, host = (planned("16GB", **asked, embedding=place) for place in ("device", "host"))
    rows = {row.name: row for row in host.rows}
    held = model(ESCHA)[1].embedding
    assert rows["embedding"].place == "host" and rows["embedding"].bytes == held > 1.2 * GB
    assert {row.name: row.bytes for row in device.rows}["weights"] - rows["weights"].bytes == held
    assert device.embedding == "device" and "embedding" not in {row.name for row in device.rows}


@pytest.mark.parametrize(
    ("machine", "tied", "words"), [(laptop(64), False, "one memory"), (cards(24), True, "stays on the device")]
)
def test_an_embedding_that_can_not_lie_apart_says_so(machine: Machine, tied: bool, words: str) -> None:
    config = {**KNOWN["qwen3.5-9b-bf16"], "tie_word_embeddings": tied}
    spec = spec_of(config)
    asked = Wishes(gpus="named", embedding="host", context=8192)
    plan = make_plan(spec, asked, machine, from_config(spec, config))
    assert plan.embedding == "device" and any(words in line for line in cautions(plan, machine, asked))


def test_memory_left_over_has_a_row_and_an_option_gives_it_to_the_pool() -> None:
    machine = machine_of("rtx3090")
    half, all_of_it = planned("rtx3090"), planned("rtx3090", pool="all")
    page = half.page_bytes
    assert left_over(half, machine) > GB > page > left_over(all_of_it, machine) >= 0
    assert "left over" in as_text(half, machine) and to_json(half, machine)["left_over_bytes"] == left_over(
        half, machine
    )
    assert all_of_it.pages - half.pages == left_over(half, machine) // page
    with pytest.raises(PlanRefused) as refused:
        planned("rtx3090", pool=4_000_000)
    assert any("without --pool" in way["change"] for way in refused.value.details["ways"])


def test_each_choice_says_what_it_gives_and_what_it_costs() -> None:
    spec, weights = model(ESCHA)
    found = {}
    for gpus in ("rtx5070", "12GB"):
        texts = [cost.text for cost in costs(planned(gpus), Wishes(gpus=gpus), machine_of(gpus), weights)]
        found[gpus] = {text.partition(" ")[0]: text for text in texts}
        assert list(found[gpus]) == ["--embedding", "--chunk", "--staging", "--max-running"]
    assert "no loss of speed" in found["rtx5070"]["--embedding"] and "+146,112" in found["rtx5070"]["--embedding"]
    assert "with device it would not fit" in found["12GB"]["--embedding"]
    assert "prefill 7" in found["rtx5070"]["--chunk"] and "instead of 8" in found["rtx5070"]["--chunk"]
    assert "prefill -6 % (as on rtx5070" in found["12GB"]["--chunk"]  # whose own figures nobody knows
    assert costs(planned("rtx3090"), Wishes(gpus="rtx3090"), machine_of("rtx3090"), weights) == ()
    asked = Wishes(gpus="rtx5070", chunk=512, embedding="host", staging=1, max_running=1)
    assert costs(make_plan(spec, asked, machine_of("rtx5070"), weights), asked, machine_of("rtx5070"), weights) == ()


def test_advice_is_the_cheapest_change_and_combines_options() -> None:
    def changes(gpus: str, **asked: object) -> list[str]:
        with pytest.raises(PlanRefused) as refused:
            planned(gpus, **asked)
        return [way["change"] for way in refused.value.details["ways"]]

    assert changes("rtx5070", context=65_536, embedding="device")[0] == "--embedding host"
    together = changes("rtx5070", context=180_000, embedding="device", chunk=8192, staging=2, max_running=1)
    assert together[0].startswith("--embedding host") and "--chunk" in together[0], together
    assert changes("12GB", context=100_000, reserve=2 * GB)[0] == "--reserve 0"
    both = changes("12GB", context=100_000, reserve=500_000_000, max_running=4, chunk=4096)
    assert " --" in both[0] and both[0].count("--") >= 2 and any(way.startswith("a larger card") for way in both)


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ({"chunk": 1_000_000}, "--chunk 7808"),
        ({"max_running": 1000}, "--max-running 7"),
        ({"kv_window": 262_144}, "--kv-window 256"),
        ({"pool": 10**20}, "without --pool"),
        ({"host_cache": 10**18}, "--host-cache"),
        ({"reserve": 10**18, "context": 8192}, "--reserve 931MB"),
        ({"reserve": 2 * GB}, "--reserve 1000MB"),
    ],
)
def test_however_much_too_much_the_option_that_asked_is_the_first_way(asked: dict[str, int], option: str) -> None:
    """In no time, with what it gains, and what is advised fits."""
    with pytest.raises(PlanRefused) as refused:
        planned("rtx5080", ESCHA + "-exl3-4.0bpw", **asked)
    first, missing = refused.value.details["ways"][0], refused.value.details["missing_bytes"]
    assert first["change"].startswith(option), first
    assert all(not lacks or first[f"{place}_bytes"] >= lacks for place, lacks in missing.items())


def test_a_card_that_is_advised_instead_of_the_cpu_is_the_least_that_holds_it() -> None:
    spec, weights = model(ESCHA)
    with pytest.raises(PlanRefused) as refused:
        make_plan(spec, Wishes(gpus="cpu"), laptop(24), weights)
    one = next(way["change"] for way in refused.value.details["ways"] if "one NVIDIA card" in way["change"])
    size = int(one.rpartition(" ")[2].removesuffix("GB"))
    assert size == 12 and planned(f"{size}GB").context >= 4096
    with pytest.raises(PlanRefused):
        planned(f"{size - 1}GB")


def test_a_slow_card_beside_a_fast_one_is_named() -> None:
    spec, weights = model(ESCHA)

    def said(gpus: str) -> tuple[str, ...]:
        machine, wishes = machine_of(gpus), Wishes(gpus=gpus)
        plan = make_plan(spec, wishes, machine, weights)
        return uneven(plan, predict(plan, machine, weights), wishes, machine, weights)

    (line,) = said("rtx3060,rtx3090")
    assert line.startswith("rtx3090 alone is faster") and line.endswith("--gpus rtx3090")
    assert said("rtx5070,rtx5070") == said("rtx3090") == ()
    assert said("12GB,rtx3090") == ()  # nobody knows what the two do together


def test_what_wsl_keeps_and_what_was_proven(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    spec, weights = model(ESCHA)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(devices.wsl, "under_wsl", lambda: False)
    assert resolve("rtx5070").reserve == 0
    on_linux = beside_wsl(spec, Wishes(gpus="rtx5070", max_running=1), machine_of("rtx5070"), weights)
    assert (
        on_linux and on_linux.plan and on_linux.text.startswith("Under WSL2, where 1.0 GB more stay free, it is 77,568")
    )
    assert beside_wsl(spec, Wishes(gpus="rtx5070", reserve=0), machine_of("rtx5070"), weights) is None

    monkeypatch.setattr(devices.wsl, "under_wsl", lambda: True)
    assert resolve("rtx5070").reserve == GB and resolve("cpu").reserve == 0
    other = beside_wsl(spec, Wishes(gpus="rtx5070"), replace(machine_of("rtx5070"), reserve=GB), weights)
    assert other and other.to_json()["where"] == "linux" and other.to_json()["context"] >= 186_000
    record = tmp_path / "kakera" / "proven.json"
    record.parent.mkdir()
    card = {"card": "NVIDIA GeForce RTX 5070", "driver": "580.88"}
    for text, reserve in (
        ('[{"card": "RTX 5070", "driver": "580.88", "reserve": 200000000}]', 200_000_000),
        ('[{"card": "rtx3060", "driver": "580.88", "reserve": 1}]', GB),
        ("[{}]", GB),
        ("no JSON", GB),
        ('{"card": 1}', GB),
    ):
        record.write_text(text)
        assert resolve(card["card"]).reserve == reserve
    assert resolve("rtx5070,rtx3060").reserve == GB  # the card that needs most


def test_a_plan_takes_no_time() -> None:
    """Milliseconds of computing time, the slowest search: every choice is looked at."""
    spec, weights = model(ESCHA)
    began = time.process_time()
    for _ in range(5):
        draft(spec, Wishes(gpus="12GB"), machine_of("12GB"), weights)
    assert (time.process_time() - began) / 5 < 0.2


@pytest.mark.parametrize("wrong", [{"staging": 0}, {"reserve": -1}, {"pool": 100, "context": 8192}, {"pool": "much"}])
def test_wrong_wishes(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(wrong))}"):
        planned("16GB", **wrong)


ASKED = st.fixed_dictionaries(
    {},
    optional={
        "context": st.sampled_from([2048, 40_000, 65_536, 180_000, 262_144]),
        "max_running": st.sampled_from([1, 2, 5]),
        "chunk": st.sampled_from([256, 1024, 4096]),
        "kv": st.just("bf16"),
        "embedding": st.sampled_from(["device", "host"]),
        "host_cache": st.sampled_from([0, 2 * GB]),
        "reserve": st.sampled_from([0, GB]),
    },
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([ESCHA, f"{ESCHA}-exl3-4.0bpw", "qwen3.5-9b-bf16"]),
    st.lists(st.integers(9_000, 40_000), min_size=2, max_size=4, unique=True),
    st.sampled_from([8.0, 16.0, 32.0]),
    ASKED,
)
def test_more_memory_is_never_worse_and_nothing_beats_the_choice(name, sizes_mb, ram_gb, asked) -> None:
    spec, weights = model(name)
    wishes, worth = Wishes(gpus="named", **asked), 0
    for size in sorted(sizes_mb):
        machine = cards(size / 1000, ram_gb=ram_gb)
        best = draft(spec, wishes, machine, weights)
        if best.fits:
            plan, device = best.plan, machine.devices[0]
            assert plan.total("device") <= device.bytes - margin(device.bytes) - (wishes.reserve or 0)
            assert plan.total("host") <= machine.ram - machine.ram_used - margin(machine.ram)
            assert plan.pages * 64 >= plan.context
        now = best.plan.context * best.plan.slots if best.fits else 0
        assert now >= worth, "more memory gave less"
        worth = now
        assert not _neighbours_that_are_preferred(Case(spec, wishes, machine, weights), best)


def _neighbours_that_are_preferred(case: Case, best: Draft) -> list[Draft]:
    """The order of preference as the docs tell it, applied to every other choice."""

    def rank(draft: Draft) -> tuple[object, ...]:
        plan = draft.plan
        speed = (plan.chunk, plan.state_dtype == "fp32", plan.staged, plan.embedding == "device")
        return (min(plan.context, ENOUGH), plan.slots, plan.context, draft.checkpoints > 0, *speed)

    others = [found for choice in choices(case) if admits(case, found := case.draft(choice)) and found.fits]
    if not best.fits:
        return others
    assert all((rank(found) > rank(best)) == (preference(found) > preference(best)) for found in others)
    return [found for found in others if rank(found) > rank(best)]
