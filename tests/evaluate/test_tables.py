import numpy as np
import pytest

from kakera.errors import UsageError
from kakera.evaluate.data import load_baseline, load_cases, load_documents, shipped
from kakera.evaluate.intervals import estimate, share
from kakera.evaluate.tables import Answer, groups
from kakera.evaluate.windows import cut


def test_groups_count_by_kind_and_size_and_against_the_baseline():
    answers = [
        Answer("a", "single", "1k", True, "7", 10),
        Answer("b", "single", "1k", False, "8", 10),
        Answer("c", "multi", "1k", True, "9", 10),
    ]
    baseline = {"a": {"ok": True, "answer": " 7 "}, "b": {"ok": True, "answer": "7"}}
    single, multi, everything = groups(answers, baseline)
    assert (single.right, single.total, single.base_right, single.base_total) == (1, 2, 2, 2)
    assert (single.same_verdict, single.same_text) == (1, 1)
    assert (multi.right, multi.total, multi.base_total) == (1, 1, 0)
    assert "baseline" not in multi.json()
    assert (everything.kind, everything.right, everything.total, everything.base_total) == ("all", 2, 3, 2)


def test_every_shipped_suite_loads_and_every_case_names_its_fields():
    kinds = {suite: {c["kind"] for c in load_cases(suite)} for suite in ("retrieval", "tools", "json")}
    assert kinds["retrieval"] == {"single", "multi_key", "multi_hop"}
    assert kinds["tools"] == {"single", "parallel", "none", "second_turn", "after_result"}
    assert kinds["json"] == {"keys", "schema"}
    known = load_baseline(shipped("baseline.jsonl"))
    assert all(case["id"] in known for case in load_cases("retrieval"))
    assert sum(map(len, load_documents(None))) > 100_000


def test_limit_draws_a_sample_by_seed_in_file_order():
    everything = [case["id"] for case in load_cases("tools")]
    some = [case["id"] for case in load_cases("tools", limit=10, seed=1)]
    assert len(some) == 10 and some == sorted(some, key=everything.index)
    assert some == [case["id"] for case in load_cases("tools", limit=10, seed=1)]
    assert some != [case["id"] for case in load_cases("tools", limit=10, seed=2)]


def test_data_that_can_not_be_used_is_refused_in_words(tmp_path):
    with pytest.raises(UsageError, match="can not read"):
        load_cases("tools", tmp_path / "none.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "a", "kind": "x", "messages": [], "score": "no_calls"}\n\n{"id":\n')
    with pytest.raises(UsageError, match="line 3: not JSON"):
        load_cases("tools", bad)
    bad.write_text('{"id": "a", "messages": []}\n')
    with pytest.raises(UsageError, match="lacks kind, score"):
        load_cases("tools", bad)
    bad.write_text('{"id": "a", "kind": "x", "messages": [], "score": "no_calls"}\n' * 2)
    with pytest.raises(UsageError, match="several cases have the id 'a'"):
        load_cases("tools", bad)
    with pytest.raises(UsageError, match="no case is left"):
        load_cases("retrieval", max_prompt_tokens=5)


def test_windows_are_cut_from_the_joined_documents():
    windows = cut(["abc", "de"], lambda text: [ord(c) for c in text], 0, 3)
    assert windows == [(97, 98, 99), (0, 100, 101)]
    assert cut(["abcdefgh"], lambda text: list(range(8)), None, 2, limit=2, seed=3) == cut(
        ["abcdefgh"], lambda text: list(range(8)), None, 2, limit=2, seed=3
    )
    with pytest.raises(UsageError, match="less than one window"):
        cut(["abc"], lambda text: [1, 2, 3], None, 10)
    with pytest.raises(UsageError, match="at least 2"):
        cut(["abc"], lambda text: [1, 2, 3], None, 1)


def test_estimate_is_as_wide_as_independent_positions_make_it_and_wider_for_dependent_ones():
    noise = np.random.default_rng(1).normal(2.0, 1.0, 40_000)
    free, tied = estimate(noise), estimate(np.repeat(noise[::256], 256))
    assert free.low < free.mean < free.high
    assert free.high - free.low == pytest.approx(2 * 1.645 / 40_000**0.5, rel=0.2)
    assert tied.high - tied.low == pytest.approx(2 * 1.645 / 157**0.5, rel=0.2)
    assert estimate(np.full(1000, 3.0)).low == pytest.approx(3.0)


def test_share_interval_stays_within_0_and_1():
    assert share(5, 5).high == 1.0 and 0.5 < share(5, 5).low < 1.0
    assert share(0, 5).low == 0.0
    assert share(50, 100).low == pytest.approx(0.419, abs=0.002)
