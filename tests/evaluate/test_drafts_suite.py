"""Acceptance of guesses: counted by depth behind right ones only, and what an engine reports of itself."""

from __future__ import annotations

from kakera.arch.registry import load_spec
from kakera.evaluate.drafts import NEW_TOKENS, acceptance, prompts, table
from kakera.evaluate.session import open_engine, open_reader
from kakera.plan.plan import Wishes
from tiny_model import write_tiny_model

SMALL = Wishes(gpus="cpu", context=1024, max_running=1, kv_group=32, kv_window=128, host_cache=0, drafts=3)


def test_every_guess_is_counted_once_and_at_its_depth(tmp_path):
    write_tiny_model(tmp_path, draft=True)
    engine = open_engine(tmp_path, SMALL)
    assert engine.runner.drafts is not None
    ends = load_spec(tmp_path).eos
    texts = {"loops": [[65, 66, 67] * 20, [70] * 40], "text": [list(range(90))]}
    found = acceptance(engine, texts, 3, True, ends)
    assert [(t.texts, t.source, t.temperature) for t in found] == [
        (name, source, temperature) for temperature in (0.0, 1.0) for name in texts for source in ("layer", "look-up")
    ]
    counters = engine.scheduler.cache.counters
    assert sum(sum(t.right) for t in found) == counters["accepted_tokens"]
    for tally in found:
        assert tally.tokens <= NEW_TOKENS * len(texts[tally.texts])
        assert all(right <= made for made, right in zip(tally.made, tally.right, strict=True))
        assert all(behind <= right for right, behind in zip(tally.right, tally.made[1:], strict=False))
        assert tally.rounds == tally.made[0]
        assert len(tally.made) == (3 if tally.source == "layer" else 31)
    assert table("drafts", found, 3).row_count == 8


def test_texts_of_all_kinds_are_made_from_what_is_shipped(tiny_model):
    reader = open_reader(tiny_model)
    texts = prompts(reader, 2, 1)
    assert list(texts) == ["text", "tools", "json", "copy", "edit"] and {len(some) for some in texts.values()} == {2}
    assert prompts(reader, 2, 1) == texts != prompts(reader, 2, 2)
