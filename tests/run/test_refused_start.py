"""A driver that refuses memory at the start: words, and exit status 1."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kakera.errors import KakeraError
from kakera.run import refused
from kakera.run.refused import refusals_in_words
from kakera.target.devices import Device


def plan_of(cards: bool) -> SimpleNamespace:
    target = SimpleNamespace(has_cards=cards)
    return SimpleNamespace(target=target, device_bytes=(12 * 10**9,), total=lambda place: 10 * 10**9)


@pytest.fixture
def desktop(monkeypatch) -> None:
    users = ("GPU 0 (card): process 7 holds 2.0 GB of it, which the plan leaves alone; close it",)
    monkeypatch.setattr(refused, "detect_gpus", lambda: ((Device("card", 12 * 10**9, used=2 * 10**9),), users))
    monkeypatch.setattr(refused, "under_wsl", lambda: True)


def test_what_a_refusing_driver_says_becomes_a_message_with_status_1(desktop):
    """Which the engine's process hands on to the server's."""
    with pytest.raises(KakeraError) as refusal, refusals_in_words(plan_of(cards=True)):
        raise RuntimeError("CUDA error: device not ready")
    said = str(refusal.value)
    assert refusal.value.exit_status == 1 and "10.00 of 12.00 GB" in said and "process 7 holds 2.0 GB of it)" in said
    assert "expandable_segments is" in said and "WSL2" in said


@pytest.mark.parametrize(("cards", "words"), [(True, "an illegal memory access"), (False, "out of memory")])
def test_other_errors_and_those_of_a_cpu_stay_what_they_are(desktop, cards, words):
    with pytest.raises(RuntimeError, match=words), refusals_in_words(plan_of(cards)):
        raise RuntimeError(words)


def test_errors_of_ours_pass(desktop):
    with pytest.raises(KakeraError, match="no such file"), refusals_in_words(plan_of(cards=True)):
        raise KakeraError("no such file; out of memory")
