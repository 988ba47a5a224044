"""The status document, the memory map and the page's files, without a browser."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
from live_server import HELLO, MINI

from kakera.arch.registry import load_spec
from kakera.contract.events import Active, EngineStats
from kakera.plan import weights
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.server.operate.memory_map import bars, lent_line
from kakera.server.operate.page import DIRECTORY
from kakera.server.operate.sensors import CardReading, Reading, Sensors
from kakera.target.devices import Device, Machine
from kakera.target.target import CPU, CUDA, Target

GB = 10**9


def plan_of(*devices: Device, target: Target = CUDA) -> Plan:
    spec = load_spec(MINI)
    machine = Machine(target, devices, 32 * GB, 0)
    return make_plan(spec, Wishes(context=8192), machine, weights.from_checkpoint(MINI, spec))


def stats_of(plan: Plan, used: int = 0, cached: int = 0, running: int = 0, host: int = 0) -> EngineStats:
    stats = EngineStats(running=running, pages_free=plan.pages - used, pages_cached=cached, pages_total=plan.pages)
    return replace(stats, slots_free=plan.slots - running, slots_total=plan.slots, host_bytes_used=host)


def card(used: int) -> CardReading:
    return CardReading("card", 12 * GB, used, 100.0, 250.0, 60, 90)


def used_of(bar) -> dict:
    return {row.name: used for row, used in bar.rows}


def test_every_row_of_the_plan_stands_beside_what_fills_it():
    plan = plan_of(Device("card", 12 * GB))
    pages = {row.name: row.bytes for row in plan.rows if row.meter == "pages"}
    full = pages["KV pages, one full request"] // plan.page_bytes
    stats = stats_of(plan, used=full + 3, cached=5, running=2, host=77)
    gpu, host = bars(plan, stats, Reading(32 * GB, GB, 0, (card(GB),)))
    assert {row for row, _ in gpu.rows + host.rows} == set(plan.rows)
    used = used_of(gpu)
    assert used["weights"] > 0 and used["activations and scratch"] is None
    assert used["KV pages, one full request"] == full * plan.page_bytes
    assert used["KV pages, further"] == 8 * plan.page_bytes
    states = next(row for row in plan.rows if row.name == "recurrent states")
    assert used["recurrent states"] == states.bytes * 2 // plan.slots
    assert used_of(host)["prefix cache store"] == 77


def test_what_is_lent_is_said_with_its_size_and_who_waits():
    plan = plan_of(Device("card", 12 * GB))
    stats = stats_of(plan)
    assert lent_line(plan, stats) is None
    lent = replace(stats, pages_lent=plan.pages - 256, pages_free=256, held_back=2)
    size = f"{(plan.pages - 256) * plan.page_bytes / GB:.2f} GB"
    line = lent_line(plan, lent)
    assert size in line and "under 16,384 tokens run, longer ones wait; 2 such" in line
    gpu, _ = bars(plan, lent, Reading(32 * GB, GB, 0, (card(GB),)))
    assert all(used == 0 for row, used in gpu.rows if row.meter == "pages")


def test_a_cpu_has_one_memory_with_all_rows():
    plan = plan_of(Device("cpu", 32 * GB), target=CPU)
    (bar,) = bars(plan, stats_of(plan), Reading(32 * GB, GB, 0))
    assert len(bar.rows) == len(plan.rows)


@pytest.mark.parametrize(("target", "level", "filled"), [(CUDA, 1, 0), (CUDA, 2, 0), (CPU, 1, 1), (CPU, 2, 0)])
def test_weights_of_an_engine_that_sleeps_fill_nothing_where_they_are_not(target, level, filled):
    plan = plan_of(Device("it", 12 * GB), target=target)
    first, *_ = bars(plan, replace(stats_of(plan), asleep=level), Reading(32 * GB, GB, 0, (card(GB),)))
    weights_row = next(row for row in plan.rows if row.name == "weights")
    assert used_of(first)["weights"] == filled * weights_row.bytes


def test_a_full_pool_fills_its_rows_to_the_byte():
    plan = plan_of(Device("card", 12 * GB))
    gpu, _ = bars(plan, stats_of(plan, used=plan.pages), Reading(32 * GB, GB, 0))
    assert all(used == row.bytes for row, used in gpu.rows if row.meter == "pages")


@pytest.mark.parametrize(("free", "state"), [(5.0, "ok"), (1.2, "near"), (0.9, "over")])
def test_the_cliff_is_announced(free, state):
    plan = plan_of(Device("card", 12 * GB))
    kept = bars(plan, stats_of(plan), Reading(32 * GB, GB, 0))[0].margin
    gpu, host = bars(plan, stats_of(plan), Reading(32 * GB, GB, 0, (card(int(12 * GB - free * kept)),)))
    assert (gpu.state, host.state) == (state, "ok")
    assert (gpu.warning is None) == (state == "ok")
    if state == "over":
        assert "must stay free" not in gpu.warning and "--context" in gpu.warning


def test_a_card_that_does_not_tell_its_power_is_still_read(monkeypatch):
    def refuse(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    memory = SimpleNamespace(total=12 * GB, used=3 * GB)
    reasons = [0x20 | 0x4, 0x4]  # within its power limit; hot as well
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda handle: b"some card",
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetPowerUsage": refuse,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 250_000,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=40),
        "nvmlDeviceGetTemperature": lambda handle, kind: 55,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 2500,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: reasons.pop(),
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    reading = Sensors(cards=2).read()
    readings = [
        CardReading("some card", 12 * GB, 3 * GB, None, 250.0, 55, 40, 2500, slowed) for slowed in (False, True)
    ]
    assert list(reading.cards) == readings
    assert reading.resident > 0 and reading.host_bytes > reading.host_used > 0
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: refuse(0))
    assert Sensors(cards=1).read().cards == ()


def test_the_status_has_figures_and_no_text(live):
    secret = "the plum is in the icebox"
    live.chat(secret)
    status = live.http.get("/v1/kakera/status")
    assert secret not in status.text and "Hello" not in status.text
    found = status.json()
    last = found["finished"][0]
    assert (last["cached"], last["miss"], last["finish"]) == (7, "cold", "stop")
    assert found["model"] == "mini" and found["generated_tokens"] > 0 and found["resident_bytes"] > 0
    assert found["memory"] == [] and found["active"] == []


def test_the_page_comes_with_a_strict_policy_and_from_here_alone(live):
    page = live.http.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for path in re.findall(r'(?:href|src)="(/[^"]*)"', page.text):
        assert live.http.get(path).status_code == 200, path
    for file in DIRECTORY.iterdir():
        assert live.http.get(f"/page/{file.name}").status_code == 200
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, f"{file.name} names another place"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\bstyle=|\bon\w+=\"", text), file.name
    assert live.http.get("/page/../app.py").status_code == 404


def test_seconds_go_on_between_reports():
    active = Active("a", 100, 0, 64, 100, 0, seconds=1.0, decode_seconds=0.0)
    assert active.later(0.5) == replace(active, seconds=1.5), "it has no first token yet"
    decoding = replace(active, generated=3, decode_seconds=0.25)
    assert decoding.later(0.5) == replace(decoding, seconds=1.5, decode_seconds=0.75)


def test_a_request_shows_while_its_prompt_is_made(serve, monkeypatch):
    """Template and tokeniser take a second for the longest prompts; what is asked meanwhile sees it wait."""
    server = serve(HELLO)
    began, go_on = threading.Event(), threading.Event()

    def slow(*args):
        began.set()
        assert go_on.wait(10)
        return prompt(*args)

    prompt = server.model.template.prompt
    monkeypatch.setattr(server.model.template, "prompt", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.chat)
        assert began.wait(5)
        load = server.http.get("/get_load").json()[0]
        figures = server.http.get("/metrics").text
        found = server.http.get("/health").json(), server.http.get("/v1/kakera/status").json()["engine"]["waiting"]
        go_on.set()
        assert answer.result().status_code == 200
    assert found == ({"status": "ok", "running": 0, "waiting": 1}, 1)
    assert load["num_waiting_reqs"] == 1 and "kakera_waiting 1.0" in figures
    assert server.http.get("/health").json()["waiting"] == 0
