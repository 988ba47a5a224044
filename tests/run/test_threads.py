"""How many threads a CPU engine takes, over timings recorded on machines that were idle, busy or narrow."""

from __future__ import annotations

import os

import pytest

from kakera.contract.step import StepResult
from kakera.run.threads import fewest_of_the_fast, settle_threads, try_threads
from kakera.target.threads import cpu_quota, given_threads, patient_threads

TIMINGS = {  # seconds of a step by threads, what is tried, what is taken
    "one core": ({1: 0.3}, [1], 1),
    "two idle cores": ({2: 0.170, 1: 0.255}, [2, 1], 2),
    "a busy laptop, spinning": ({2: 4.0, 1: 0.25}, [2, 1], 1),
    "two cores, both busy, asleep": ({2: 0.897, 1: 1.307}, [2, 1], 2),
    "alike: the fewest": ({4: 0.100, 2: 0.102, 1: 0.104}, [4, 2, 1], 1),
    "a large model: one thread is never tried": ({16: 1.0, 8: 1.8, 4: 3.5, 2: 7, 1: 14}, [16, 8], 16),
    "hyper-threads in the way": ({12: 0.5, 6: 0.3, 3: 0.5, 2: 0.7, 1: 1.3}, [12, 6, 3], 6),
    "a small model on many cores": ({64: 2.0, 32: 1.0, 16: 0.4, 8: 0.2, 4: 0.1, 2: 0.08, 1: 0.09}, None, 2),
}


@pytest.mark.parametrize(("seconds", "tried", "taken"), TIMINGS.values(), ids=TIMINGS)
def test_the_fewest_threads_of_the_fast_are_taken(seconds, tried, taken):
    timings = try_threads(max(seconds), seconds.__getitem__)
    assert list(timings) == (tried or sorted(seconds, reverse=True))
    assert fewest_of_the_fast(timings) == taken


def test_the_least_quota_on_the_way_to_this_process_counts(tmp_path):
    own, group = tmp_path / "own", tmp_path / "user.slice/kakera.service"
    group.mkdir(parents=True)
    own.write_text("1:name=x:/\n0::/user.slice/kakera.service\n")
    assert cpu_quota(tmp_path, own) is None
    (tmp_path / "user.slice/cpu.max").write_text("350000 100000\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path, own) == 3.5
    (group / "cpu.max").write_text("20000 100000\n")
    assert given_threads(tmp_path, own) == 1
    (tmp_path / "cpu.max").write_text("no numbers\n")
    assert cpu_quota(tmp_path, tmp_path / "missing") is None
    assert given_threads(tmp_path, tmp_path / "missing") == len(os.sched_getaffinity(0))


def test_a_user_who_has_chosen_is_obeyed_and_nothing_is_measured(monkeypatch):
    import torch

    class Runner:
        def execute(self, plan, sampling=()):
            raise AssertionError("a step that nobody asked for")

    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    try:
        assert settle_threads(Runner(), 3) == "computes with 3 threads" and torch.get_num_threads() == 3
        assert settle_threads(Runner(), None) == "computes with 3 threads, as the environment says"
    finally:
        torch.set_num_threads(before)


def test_measuring_takes_short_steps_in_one_slot_and_says_what_it_found(monkeypatch):
    import torch

    slots = set()

    class Runner:
        def execute(self, plan, sampling=()):
            slots.update(row.slot for row in plan.rows)
            assert all(row.end <= 64 and row.page_count == 1 for row in plan.rows)
            return StepResult(plan.step, (), 0.0)

    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kakera.run.threads.given_threads", lambda: 4)
    try:
        words = settle_threads(Runner(), None)
        assert f"computes with {torch.get_num_threads()} thread" in words and "of 4" in words and "--threads" in words
    finally:
        torch.set_num_threads(before)
    assert slots == {0}


def test_a_policy_of_the_users_own_stays(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with patient_threads(True):
        assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    with patient_threads(False):
        assert "OMP_WAIT_POLICY" not in os.environ
    with patient_threads(True):
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in os.environ
