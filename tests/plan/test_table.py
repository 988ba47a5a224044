"""What a person reads and what a program reads are the same plan."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from machines import cards, laptop

from kakera.arch.spec import ModelSpec
from kakera.plan.plan import Wishes
from kakera.plan.planner import make_plan
from kakera.plan.speed import predict
from kakera.plan.table import as_rows, as_text, speed_line, summary, to_json
from kakera.plan.weights import WeightBytes
from kakera.target.devices import resolve


def test_text_has_every_row_and_the_sums(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    machine = cards(12, 12)
    plan = make_plan(spec_27b, Wishes(gpus="12GB,12GB"), machine, weights_27b)
    text = as_text(plan, machine)
    for row in plan.rows:
        assert row.name in text
    assert f"{plan.total('device') / 1e9:.2f} GB" in text
    assert "12GB + 12GB" in text


def test_cpu_shows_one_column_whose_total_is_the_sum(spec_small: ModelSpec, weights_small: WeightBytes) -> None:
    machine = laptop(24)
    plan = make_plan(spec_small, Wishes(gpus="cpu"), machine, weights_small)
    rows = as_rows(plan, machine)
    assert all(host == "" for _, _, host, _ in rows)
    total = next(device for name, device, _, _ in rows if name == "total")
    assert total == f"{(plan.total('device') + plan.total('host')) / 1e9:.2f} GB"
    notes = {name: note for name, _, _, note in rows}
    assert notes["kept free"] == "near the end the system swaps" and notes["capacity"] == "this machine's memory"


def test_json_sums_up(spec_27b: ModelSpec, weights_27b: WeightBytes) -> None:
    machine = cards(12, 12)
    plan = make_plan(spec_27b, Wishes(gpus="12GB,12GB"), machine, weights_27b)
    data = json.loads(json.dumps(to_json(plan, machine)))
    assert data["fits"] is True
    assert sum(row["bytes"] for row in data["rows"] if row["place"] == "device") == data["totals"]["device"]
    assert data["pool_tokens"] == 64 * plan.pages


@pytest.mark.parametrize(("sizes", "words"), [((24,), "on one card;"), ((12, 12), "on each of 2 cards;")])
def test_one_line_for_a_log_says_where(
    spec_27b: ModelSpec, weights_27b: WeightBytes, sizes: tuple[float, ...], words: str
) -> None:
    assert words in summary(make_plan(spec_27b, Wishes(), cards(*sizes), weights_27b))


def test_speed_of_the_27b_on_two_5070_stays_below_the_memory_wall(
    spec_27b: ModelSpec, weights_27b: WeightBytes
) -> None:
    machine = resolve("rtx5070,rtx5070")
    plan = make_plan(spec_27b, Wishes(gpus="rtx5070,rtx5070"), machine, weights_27b)
    speed = predict(plan, machine, weights_27b)
    assert speed.decode_short and speed.decode_full
    assert 60 < speed.decode_full < speed.decode_short < 150
    assert "Estimates, not measurements" in speed_line(speed, plan, machine)


def test_two_cards_prefill_faster_than_one_and_pay_for_their_sums(
    spec_27b: ModelSpec, weights_27b: WeightBytes
) -> None:
    """129 sums of 10 KiB a token over a bus of 24 GB/s: 55 us."""
    one, two = (
        predict(
            make_plan(spec_27b, Wishes(gpus=gpus, chunk=2048), resolve(gpus), weights_27b), resolve(gpus), weights_27b
        )
        for gpus in ("h200", "h200,h200")
    )
    assert one.prefill and two.prefill
    assert 1 / two.prefill == pytest.approx(0.5 / one.prefill + 129 * 10240 / 24e9, rel=1e-3)


@pytest.mark.parametrize(
    ("gpus", "unknown"), [("12GB,12GB", "12GB"), ("12GB,rtx5070", "12GB"), ("12GB,16GiB", "12GB and 16GiB")]
)
def test_speed_of_an_unknown_card_is_not_invented_and_the_card_is_named(
    spec_27b: ModelSpec, weights_27b: WeightBytes, gpus: str, unknown: str
) -> None:
    machine = resolve(gpus)
    plan = make_plan(spec_27b, Wishes(gpus=gpus), machine, weights_27b)
    line = speed_line(predict(plan, machine, weights_27b), plan, machine)
    assert line == f"No estimate of speed: the bandwidth of {unknown} is not known."


def test_planner_imports_no_torch() -> None:
    modules = "budget advice speed table weights known"
    code = (
        f"import sys; [__import__('kakera.plan.' + m) for m in '{modules}'.split()]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
