"""A vision tower in the plan: what it takes where, and what it may not take from text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machines import cards, laptop

from kakera.arch.registry import spec_of
from kakera.arch.spec import ModelSpec
from kakera.arch.stored import TensorHeader
from kakera.arch.weigh import tower_bytes
from kakera.errors import PlanRefused, UsageError
from kakera.plan.known import KNOWN
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.plan.tower import streamed_parameters
from kakera.plan.weights import WeightBytes, from_config
from kakera.target.devices import Machine

MB = 10**6
CONFIG = {**KNOWN["qwen3.8-27b"], "vision_config": {"depth": 27}, "image_token_id": 248056}
SPEC: ModelSpec = spec_of(CONFIG)
WEIGHTS: WeightBytes = replace(from_config(SPEC, CONFIG), vision=921_500_000)


def plan(machine: Machine, weights: WeightBytes = WEIGHTS, **wishes: object) -> Plan:
    return make_plan(SPEC, Wishes(**wishes), machine, weights)  # type: ignore[arg-type]


def sizes(found: Plan, place: str = "device") -> dict[str, int]:
    return {row.name: row.bytes for row in found.rows if row.place == place}


def test_without_a_tower_and_with_it_off_a_plan_is_what_it_was():
    """Public bugs 18 and 19: text-only service costs nothing."""
    for machine in (cards(24), cards(12), laptop(64)):
        blind = make_plan(SPEC, Wishes(), machine, from_config(SPEC, CONFIG))
        assert plan(machine, vision="off") == blind == plan(machine, replace(WEIGHTS, vision=0), vision="auto")
        assert blind.vision is None and blind.image_tokens == 0


def test_rows_of_a_tower_on_its_card_and_streamed():
    resident, streamed = (plan(cards(24), vision=place, context=32768) for place in ("device", "host"))
    assert sizes(resident)["vision tower"] == 921_500_000
    assert 145 * MB < sizes(resident)["images in the tower"] < 155 * MB
    assert sizes(resident, "host")["image embeddings"] == 256 * MB // 10240 * 10240
    of_vision = sum(sizes(streamed)[name] for name in ("vision tower", "images in the tower"))
    assert of_vision < 250 * MB  # the bar: of the device at 2,048 tokens an image
    assert sizes(streamed, "host")["vision tower's blocks"] == pytest.approx(913 * MB, rel=0.01)
    assert resident.image_tokens == 2048 and resident.image_store == 25000


@pytest.mark.slow
def test_a_tower_lies_where_the_context_keeps_its_length():
    """Plenty of memory: on the card. A card that is full without it: on the host."""
    assert plan(cards(24), vision="auto").vision == "device"
    tight = plan(cards(12.4), vision="auto")
    assert tight.vision == "host"
    assert tight.context > plan(cards(12.4), vision="device").context
    assert plan(laptop(128), vision="auto").vision == "device" and plan(laptop(128), vision="host").vision == "device"


@pytest.mark.slow
def test_where_no_tower_has_room_text_is_served():
    machine = laptop(63)
    assert plan(machine, vision="auto", context=16384) == plan(machine, vision="off", context=16384)
    with pytest.raises(PlanRefused, match=r"1\. --vision off"):
        plan(machine, vision="device", context=16384)
    with pytest.raises(PlanRefused, match=r"1\. --vision host"):
        plan(cards(12), vision="device", context=200_000, max_running=1)


def test_a_cpu_holds_a_tower_in_fp32_and_smaller_images():
    found = plan(laptop(128), vision="auto")
    assert found.image_tokens == 256
    assert sizes(found)["vision tower"] == pytest.approx(1843 * MB, rel=0.001)


def test_a_plan_gives_its_wishes_again():
    for machine, place in ((cards(24), "device"), (cards(24), "host"), (laptop(128), "device")):
        found = plan(machine, vision=place, image_tokens=512, context=16384)
        again = plan(machine, **{name: value for name, value in vars(found.wishes()).items() if name != "gpus"})
        assert (again.vision, again.image_tokens) == (found.vision, 512) == (place, 512)
    assert plan(cards(24), vision="off").shape != plan(cards(24), vision="device").shape


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"vision": "card"}, "choose auto, device, host or off"),
        ({"vision": "auto", "image_tokens": 63}, "64 to 16384 tokens"),
        ({"vision": "auto", "image_tokens": 20000}, "64 to 16384 tokens"),
    ],
)
def test_wrong_wishes_are_refused(wishes, said):
    with pytest.raises(UsageError, match=said):
        plan(cards(24), **wishes)


def test_a_tower_that_is_asked_for_must_be_there():
    with pytest.raises(UsageError, match="--vision device: this checkpoint holds no vision tower"):
        plan(cards(24), replace(WEIGHTS, vision=0), vision="device")


def test_bytes_of_a_stored_tower_by_its_headers():
    """Under either prefix; of one that is not whole none, since it is not loaded."""
    assert SPEC.vision is not None
    headers = [TensorHeader(t.name, Path("file"), "BF16", t.shape, 0, 2 * t.count) for t in SPEC.vision.tensors()]
    assert tower_bytes(SPEC, headers) == 2 * SPEC.vision.parameters
    short = [replace(header, name=header.name.removeprefix("model.")) for header in headers]
    assert tower_bytes(SPEC, short) == 2 * SPEC.vision.parameters
    assert tower_bytes(SPEC, headers[1:]) == 0 == tower_bytes(spec_of(KNOWN["qwen3.8-27b"]), headers)
    apart, at_a_time = streamed_parameters(SPEC.vision)
    assert 455 * MB < apart < SPEC.vision.parameters and at_a_time == pytest.approx(30.5 * MB, rel=0.01)


def test_cards_that_share_a_model_read_no_images_yet():
    assert plan(cards(24, 24), vision="auto").vision is None
    with pytest.raises(UsageError, match="several processes share"):
        plan(cards(24, 24), vision="device")
