"""What is known of a card's proofs: per card, driver and shape, written whole or not at all."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import product

import pytest

from kakera.target import devices
from kakera.target.remembered import KINDS, PROVEN, Proof, forget, proof_of, proven_reserve, remember

CARD = "NVIDIA GeForce RTX 5070"
PROOF = Proof(CARD, "580.88", 300, "shape", 190_000, 11_900, "2026-11-30")


def test_the_least_that_was_enough_counts(tmp_path) -> None:
    for proof in (PROOF, replace(PROOF, shape="small", reserve=9_000), replace(PROOF, driver="590.1", reserve=5)):
        remember(proof, tmp_path)
    assert proven_reserve("rtx5070", "580.88", tmp_path) == 300
    assert proven_reserve("rtx5070", "590.1", tmp_path) == 5
    assert proven_reserve("rtx5070", None, tmp_path) == 5  # a card that was named
    assert proven_reserve("rtx5070ti", "580.88", tmp_path) is proven_reserve("rtx5070", "1", tmp_path) is None
    remember(replace(PROOF, reserve=400), tmp_path)  # the same plan again: what was known of it goes
    assert proven_reserve(CARD, "580.88", tmp_path) == 400
    assert proof_of(CARD, "580.88", "small", tmp_path) == replace(PROOF, shape="small", reserve=9_000)
    assert proof_of(CARD, "580.88", "other", tmp_path) is proof_of("rtx3060", "580.88", "shape", tmp_path) is None


def test_a_failure_takes_back_what_left_as_little(tmp_path) -> None:
    for name, reserve in (("a", 100), ("b", 300), ("c", 500)):
        remember(replace(PROOF, shape=name, reserve=reserve), tmp_path)
    remember(replace(PROOF, driver="other", reserve=1), tmp_path)
    forget(replace(PROOF, shape="d", reserve=300), tmp_path)
    kept = json.loads((tmp_path / PROVEN).read_text())
    assert [(record["shape"], record["driver"]) for record in kept] == [("c", "580.88"), ("shape", "other")]
    forget(replace(PROOF, shape="c", reserve=0), tmp_path)  # the plan itself, however much it leaves
    assert proof_of(CARD, "580.88", "c", tmp_path) is None


def test_a_record_with_a_value_of_another_kind_is_none(tmp_path) -> None:
    """And the others still count."""
    older = replace(PROOF, shape="older", reserve=500)
    for name, value in product(KINDS, (None, "many", 1.5, 1e400, [], {})):
        if isinstance(value, KINDS[name]):
            continue
        wrong = {**asdict(PROOF), name: value}
        (tmp_path / PROVEN).write_text(json.dumps([asdict(older), wrong]))
        assert proof_of("rtx5070", None, wrong["shape"], tmp_path) is None
        assert proof_of("rtx5070", None, "older", tmp_path) == older
        assert proven_reserve("rtx5070", "580.88", tmp_path) in (300, 500)


def test_two_proofs_at_once_are_both_remembered(tmp_path) -> None:
    def prove(n: int) -> None:
        for i in range(4):
            remember(replace(PROOF, shape=f"{n}-{i}"), tmp_path)

    with ThreadPoolExecutor(4) as several:
        list(several.map(prove, range(4)))
    assert len(json.loads((tmp_path / PROVEN).read_text())) == 16


@pytest.mark.parametrize(
    "text", ["", "[" * 100_000, "no JSON", "{}", '[1, {"card": 3}]', '[{"shape": "shape", "card": "RTX 5070"}]']
)
def test_a_damaged_file_proves_nothing_and_is_replaced(tmp_path, text) -> None:
    (tmp_path / PROVEN).write_text(text)
    assert proof_of(CARD, None, "shape", tmp_path) is proven_reserve(CARD, None, tmp_path) is None
    forget(PROOF, tmp_path)
    remember(PROOF, tmp_path)
    assert proof_of(CARD, "580.88", "shape", tmp_path) == PROOF


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    remember(PROOF, tmp_path)
    before = (tmp_path / PROVEN).read_text()
    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", lambda records, file, **_: file.write("[{") and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            remember(replace(PROOF, reserve=1), tmp_path)
    assert (tmp_path / PROVEN).read_text() == before and list(tmp_path.iterdir()) == [tmp_path / PROVEN]


def test_no_more_is_kept_free_under_wsl_than_without_a_proof(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(devices.wsl, "under_wsl", lambda: True)
    remember(replace(PROOF, reserve=8 * 10**9))  # a small plan on a large card
    assert devices.resolve("rtx5070").reserve == devices.wsl.RESERVE
    remember(replace(PROOF, reserve=10**8, shape="large"))
    assert devices.resolve("rtx5070").reserve == 10**8
