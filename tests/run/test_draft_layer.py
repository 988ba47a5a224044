"""The draft layer in pages: complete wherever the model's own layers are, the same cold, cut and after a hit; and its
guesses change nothing that requests say or leave behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafted_world import checkpoints, noting, requests, row_by_row
from run_world import MACHINE, World, ask, tiny_plan, tokens_of

from kakera.contract.recording import read_recording
from kakera.errors import PlanRefused
from kakera.kv.batch import Batch, Span
from kakera.model.mtp import draft_hidden
from kakera.plan.plan import OFF, Wishes
from kakera.plan.planner import plan_and_speed
from kakera.run.build import build_engine
from kakera.run.generate import generate
from kakera.run.process.recipe import EngineRecipe, Recording, record
from kakera.run.recording.replay import Replay
from kakera.schedule.drafts import Drafts
from tiny_model import write_tiny_model

__all__ = ["row_by_row"]  # a fixture
DEPTH = 3


@pytest.fixture(scope="module")
def drafting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafting")
    write_tiny_model(directory, draft=True)
    return directory


def build(directory: Path, kv: str = "int2", drafts: Drafts | None = None, **changes) -> World:
    world = World.build(directory, kv, drafting=True, **changes)
    world.engine.scheduler.drafts = drafts
    return world


@pytest.mark.parametrize("kv", ["fp32", "int2"])
def test_guesses_change_no_bit_of_text_state_page_or_checkpoint(drafting_model, row_by_row, kv):
    """The layer's own pages, windows and sinks are among them: slots that waited for a full page and slots that were
    guessed from, found wrong and written again."""
    plain, drafted = build(drafting_model, kv), build(drafting_model, kv, Drafts(None, DEPTH, layer=True))
    wanted, found = noting(plain), noting(drafted)
    answers = plain.answer(*requests())
    for one, other in zip(answers, drafted.answer(*requests()), strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
    assert drafted.cache.counters["accepted_tokens"] > 0 < drafted.cache.counters["drafted_tokens"]
    for place, tensors in found.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted[place], strict=True)), place
    saved = checkpoints(drafted)
    assert saved.keys() == checkpoints(plain).keys() and len(saved) > 8
    for key, parts in checkpoints(plain).items():
        assert all(torch.equal(a, b) for a, b in zip(parts, saved[key], strict=True))
    drafted.check_idle()


def guesses(world: World) -> dict[int, tuple[int, ...]]:
    """From now on: what is guessed, by how many tokens stand before."""
    found, execute = {}, world.runner.execute

    def look(plan, sampling=None):
        result = execute(plan, sampling or {})
        for row, yielded in zip(plan.decode, result.rows, strict=False):
            if yielded.proposed:
                found[row.start + len(yielded.tokens) + 1] = yielded.proposed
        return result

    world.runner.execute = look
    return found


def by_definition(world: World, text: list[int], depth: int) -> tuple[int, ...]:
    """The layer over the whole text, then over its own guesses."""
    model, count = world.runner.model, len(text)
    pages = torch.arange(-(-count // 64))
    scratch = build(world.directory, "fp32")
    scratch.runner.states.reset(0)
    span = Span(0, count, 0, 0, pages)
    tokens_T = torch.tensor(text)
    batch = Batch(tokens_T, torch.arange(count), (), (span,), pages[:0])
    hidden_NH = model.hidden(batch, scratch.runner.kv.backend, scratch.runner.states)[:-1]
    found: list[int] = []
    for _ in range(depth):
        drafted_NH = draft_hidden(model, torch.tensor([*text[1:], *found]), hidden_NH)
        found.append(int(model.logits(drafted_NH[-1:]).argmax()))
        hidden_NH = torch.cat([hidden_NH, drafted_NH[-1:]])
    return tuple(found)


def test_guesses_are_the_layers_over_the_whole_text_in_any_chunks_and_after_a_hit(drafting_model):
    """LightLLM#1079, lattice#1340, mlx-vlm#2096: cold, in chunks of a page, and from a checkpoint. llama.cpp#24025,
    ik#1815, ATOM#1742: with random norms, at depths that feed the layer its own output behind its norm. A slot before
    the first, which the definition lacks, is all that may differ, so a few guesses of random weights may."""
    prompt = tokens_of(1, 300)
    seen = []
    for chunk, again in ((512, False), (64, False), (512, True)):
        world = build(drafting_model, "fp32", Drafts(None, DEPTH, layer=True), chunk=chunk)
        world.directory = drafting_model
        if again:
            world.one(ask("before", (*prompt[:200], 7), 1))
        found = guesses(world)
        answer = world.one(ask("a", prompt, 40))
        assert answer.finished.usage.cached_tokens == (192 if again else 0)
        seen.append((answer.tokens, found))
    assert seen[0] == seen[1] == seen[2]
    text, found = [*prompt, *seen[0][0]], seen[0][1]
    places = sorted(found)[:12]
    same = [found[at] == by_definition(world, text[:at], len(found[at])) for at in places]
    assert sum(same) >= 10


@pytest.mark.parametrize("kv", ["fp32", "int2"])
def test_a_page_of_the_layer_knows_nothing_of_what_comes_behind_it(drafting_model, row_by_row, kv):
    """Megatron-LM#7033, trt#18093, vllm#50062: A caches pages 0 and 1, B shares page 0 and goes on otherwise. The last
    slot of page 0 would hold A's next token if slots were numbered by the hidden state."""
    first, other = tokens_of(1, 130), (*tokens_of(1, 64), *tokens_of(2, 66))
    cold = build(drafting_model, kv, Drafts(None, DEPTH, layer=True))
    wanted = guesses(cold)
    text = cold.one(ask("b", other, 30)).tokens
    shared = build(drafting_model, kv, Drafts(None, DEPTH, layer=True))
    shared.one(ask("a", first, 30, boundaries=[64]))
    for name in ("b", "again"):
        found = guesses(shared)
        hit = shared.one(ask(name, other, 30))
        assert hit.tokens == text and found == wanted
        assert hit.finished.usage.cached_tokens >= 64


def test_guesses_of_drawn_tokens_share_the_noise_of_their_positions(drafting_model):
    """omlx#3370, mlx-lm#1085: guesses at a temperature are more than the likeliest token. Noise alone decides between
    two tokens, so that who shares it is right, and who does not every second time."""
    world = build(drafting_model, "fp32", Drafts(None, DEPTH, layer=True))
    even = {"temperature": 500.0, "seed": 5, "top_k": 2, "logit_bias": ((65, 5000.0), (66, 5000.0))}
    answer = world.one(ask("a", tokens_of(3, 70), 60, **even))
    assert set(answer.tokens) == {65, 66}
    usage = answer.finished.usage
    assert usage.accepted_tokens > 0.9 * (usage.accepted_tokens + usage.rejected_tokens)


def test_who_loses_its_pages_comes_back_and_goes_on_guessing(drafting_model):
    asked = [ask(f"p{i}", tokens_of(i, 100 + 40 * i), 70) for i in range(3)]
    wanted = build(drafting_model, "int2").answer(*asked)
    crowded = build(drafting_model, "int2", Drafts(None, DEPTH, layer=True), pages=10)
    assert [one.tokens for one in crowded.answer(*asked)] == [one.tokens for one in wanted]
    assert crowded.cache.counters["preemptions"] > 0 < crowded.cache.counters["drafted_tokens"]
    crowded.check_idle()


@pytest.mark.parametrize("wanted", ["auto", 2])
def test_an_engine_as_it_is_served_guesses_what_its_plan_says(drafting_model, tiny_model, wanted, monkeypatch):
    """The draft layer where the files hold one and the plan has room; look-ups in any case."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or threads are measured
    for directory, layer in ((drafting_model, True), (tiny_model, False)):
        said = []
        for drafts in (wanted, "auto" if wanted == 2 else 5, OFF):
            wishes = Wishes(context=2048, max_running=2, kv_group=32, kv_window=128, host_cache=2**24, drafts=drafts)
            plan, _ = plan_and_speed(directory, wishes, MACHINE)
            assert plan.spec.drafting == (layer and drafts != OFF) and plan.wishes().drafts == drafts
            engine = EngineRecipe(directory, plan)()
            request = ask("a", tokens_of(4, 70), 150, logit_bias=((66, 90.0),))
            (answer,) = generate(engine, [request]).values()
            usage = answer.finished.usage
            assert (usage.accepted_tokens > 0) == (drafts != OFF)
            said.append(answer.tokens)
        assert said[0] == said[1] == said[2]


def test_a_draft_layer_gives_way_to_context_and_to_requests(drafting_model):
    """Up to 131,072 tokens; what it would take is in the plan's rows, and a plan without guesses has its bytes."""
    whole = MACHINE.devices[0]
    wishes = Wishes(max_running=2, kv_group=32, kv_window=128, host_cache=2**24, drafts="auto")
    roomy, _ = plan_and_speed(drafting_model, wishes, MACHINE)
    assert roomy.spec.drafting and "draft layer included" in roomy.rows[0].note
    assert "drafts" in {row.name for row in roomy.rows}
    plain, _ = plan_and_speed(drafting_model, replace(wishes, drafts=OFF), MACHINE)
    assert plain.page_bytes * 2 == roomy.page_bytes and plain.checkpoint_bytes < roomy.checkpoint_bytes
    assert "drafts" not in {row.name for row in plain.rows}
    for less in range(0, 10**9, 10**6):
        bytes_ = plain.total("device") + plain.total("host") + 700 * 10**6 - less
        tight = replace(MACHINE, devices=(replace(whole, bytes=bytes_),), ram=bytes_)
        try:
            found, _ = plan_and_speed(drafting_model, wishes, tight)
        except PlanRefused:
            break
        without, _ = plan_and_speed(drafting_model, replace(wishes, drafts=OFF), tight)
        assert found.context == without.context and found.slots == without.slots
        if not found.spec.drafting:
            return
    raise AssertionError("it never gave way")


def test_a_recording_with_guesses_replays_to_the_bit(drafting_model, tmp_path):
    """The layer's pages are among what a replay compares; rows are repeated as far as they were kept."""
    plan = tiny_plan(drafting_model, drafting=True)
    engine = build_engine(drafting_model, plan, drafts=Drafts(None, DEPTH, layer=True))
    record(engine, plan, Recording(tmp_path / "run", "tiny", True))
    bias = {"logit_bias": ((65, 9.0),)}  # so that some guesses are right
    first = generate(engine, [ask("first", tokens_of(1, 150), 80, **bias)])["first"]
    turn = (*tokens_of(1, 150), *first.tokens, *tokens_of(2, 20))
    second = generate(engine, [ask("second", turn, 20, **bias)])["second"]
    assert second.finished.usage.cached_tokens == 192 and engine.scheduler.cache.counters["accepted_tokens"] > 9
    header, steps = read_recording(tmp_path / "run")
    steps = list(steps)
    replay = Replay(build_engine(drafting_model, plan).runner, plan, header, [one for s in steps for one in s.inputs])
    assert [difference for step in steps for difference in replay.step(step)] == []
