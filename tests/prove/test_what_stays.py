"""What is kept of a proof, and what may be posted of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from traces import CARD, MIB, healthy, on_host, without

from kakera.arch.registry import spec_of
from kakera.plan.known import KNOWN
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.plan.proven import proof_for
from kakera.plan.weights import from_config
from kakera.prove.kept import keep
from kakera.prove.report import record, summary
from kakera.prove.verdict import judge
from kakera.target.devices import Device, Machine
from kakera.target.remembered import proven_reserve
from kakera.target.target import CUDA

NAME = "qwen3.8-27b"
BASE = healthy()


def machine(used: int = CARD.used_before) -> Machine:
    return Machine(CUDA, (Device(CARD.name, CARD.bytes, used, driver=CARD.driver),), 64 * 10**9)


def planned(used: int = CARD.used_before, **wishes: object) -> Plan:
    spec = spec_of(KNOWN[NAME])
    return make_plan(spec, Wishes(max_running=1, **wishes), machine(used), from_config(spec, KNOWN[NAME]))  # type: ignore[arg-type]


def test_what_was_proven_is_known_to_the_next_plan(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    plan = planned()
    assert proof_for(plan, machine()) is None
    keep(judge(BASE), BASE, plan, machine())
    found = proof_for(plan, machine())
    assert found and found.context == plan.context and proven_reserve(CARD.name, CARD.driver) == found.reserve > 0
    less = 400_000_000  # others hold more: a smaller plan of the same shape
    assert proof_for(planned(less), machine(less)) == found
    assert proof_for(planned(0), machine(0)) is None  # a larger one
    assert proof_for(planned(context=8192), machine()) is None  # of another shape: it has a larger chunk
    (other,) = machine().devices
    assert proof_for(plan, replace(machine(), devices=(replace(other, driver="600.1"),))) is None
    blind = without(BASE, "free")
    keep(judge(blind), blind, plan, machine())  # by the plan, then
    assert (again := proof_for(plan, machine())) and 0 <= again.reserve < 100 * MIB
    spilled = on_host(BASE, "weights", 1, (1, 2))
    keep(judge(spilled), spilled, plan, machine())
    assert proof_for(plan, machine()) is proven_reserve(CARD.name, CARD.driver) is None


def strings(value: object) -> set[str]:
    if isinstance(value, dict):
        return set().union(*(strings(item) for item in value.values()))
    if isinstance(value, list | tuple):
        return set().union(*(strings(item) for item in value))
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("failure", [None, "the server ended: /home/jane/models/x on box-7, GPU-4f3c-11"])
def test_a_report_can_be_posted(failure, monkeypatch) -> None:
    monkeypatch.setenv("HOSTNAME", "box-7")
    trace = replace(on_host(BASE, "KV pages", 2, (1, 2)), failure=failure)
    plan = replace(planned(), rotation="/home/jane/rotation")
    text = json.dumps(record(judge(trace), trace, plan))
    assert not re.search(r"jane|box-7|/(?!s\b)|GPU-|\\", text)
    found = json.loads(text)
    assert found["plan"]["rotated"] is True and found["trace"]["failure"] is (failure is not None)
    kinds = [finding["kind"] for finding in found["verdict"]["findings"]]
    assert kinds == (["wrong"] if failure else []) + ["spill"]
    assert found["verdict"]["findings"][-1]["spilled"][0]["region"] == "KV pages"
    words = strings(found["trace"])
    assert words <= {CARD.name, CARD.driver, "calibration", "filling", "answering", "other"} | {
        read.region for read in trace.sweeps[0]
    }
    assert len(text) < 400_000


def test_a_summary_has_the_figures() -> None:
    found = summary(judge(BASE), BASE, planned())
    assert found["proven"] and not found["findings"]
    assert 11.5e9 < found["peak_bytes"] < 12e9 and 500e9 < found["read_bytes_per_second"] < 700e9
    assert found["second_turn"]["same"] and found["prefill_tokens_per_second"] > 1000
