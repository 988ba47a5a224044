"""A model shared by two processes: the answers of one, the bits of two threads, whatever a request wishes.

What features of the engine add themselves to, as to test_shared_model.py. Rank 0 is this process; starting the other
one takes seconds, so that one pair serves all requests of a codec.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import psutil
import pytest
from run_world import CODECS, World, ask, equal, logprob_gap, tiny_plan, tokens_of
from shared_world import ProcessWorld, SharedWorld, write_shared

from kakera.contract.recording import read_recording
from kakera.contract.request import Constraint, Request
from kakera.contract.step import SamplingInput
from kakera.errors import RanksApart
from kakera.run.build import build_engine
from kakera.run.generate import generate
from kakera.run.process.recipe import Recording, record
from kakera.run.recording.replay import Replay
from kakera.schedule.drafts import Drafts

CLOSE = 1e-3  # of log-probabilities: sums in another order may flip a code of INT2
PAGES = 8


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shared(tmp_path_factory.mktemp("shared"))


def wishes(name: str) -> list[Request]:
    """What sampling depends on, and what only rank 0 knows."""
    drawn = {"temperature": 1.0, "seed": 3, "logprobs": 2}
    return [
        ask(f"echo {name}", tokens_of(1, 70), 3, prompt_logprobs=1),
        ask(f"drawn {name}", tokens_of(2, 90), 12, **drawn, top_p=0.9, repetition_penalty=1.3),
        ask(f"grammar {name}", tokens_of(3, 20), 12, constraint=Constraint("start: /[a-c]{3,8}/")),
        ask(f"wrong grammar {name}", tokens_of(4, 30), 5, constraint=Constraint("start: /(/")),
    ]


def guesses(given: SamplingInput, most: int) -> list[int]:
    """Right by chance here and there, since a text likes its own tokens."""
    rng = random.Random(len(given.context))
    return [given.context[-rng.randrange(1, 4)] for _ in range(min(most, rng.randrange(4)))]


@pytest.mark.slow
@pytest.mark.parametrize("kv", CODECS)
def test_two_processes_answer_as_one(shared_model, tmp_path, kv):
    alone, threads = World.build(shared_model, kv), SharedWorld.share(shared_model, 2, kv, pages=PAGES)
    grown = [ask(f"p{i}", tokens_of(i, 100), 40) for i in range(3)]
    with ProcessWorld.share(shared_model, 2, kv, pages=PAGES) as world:
        world.watch()
        record(world.engine, world.plan, Recording(tmp_path / "record", "shared", prompts=True))
        for n in (70, 300):
            prompt = tokens_of(n, n)
            for kind in ("cold", "warm"):
                request = ask(f"{kind} {n}", prompt, 8)
                wanted, found = threads.one(request), world.one(request)
                assert found.tokens == wanted.tokens == alone.one(request).tokens
                assert logprob_gap(found, wanted) == 0.0, "the sums are the same"
                assert equal(world.seen[request.id], threads.seen[request.id])
            assert equal(world.seen[f"cold {n}"], world.seen[f"warm {n}"])
            assert found.finished.usage.cached_tokens >= n - 64
        for one, other in zip(world.answer(*grown), alone.answer(*grown), strict=True):
            assert one.tokens == other.tokens
        assert world.cache.counters["preemptions"] > 0
        for name, drafter in (("without drafts", None), ("with drafts", guesses)):
            world.engine.scheduler.drafts = drafter and Drafts(drafter)
            for one, other in zip(world.answer(*wishes(name)), alone.answer(*wishes(name)), strict=True):
                assert logprob_gap(one, other) < CLOSE and one.finished.reason == other.finished.reason
                assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
        world.check_idle()
        world.engine.runner = world.engine.runner.runner
        _killed(world)
    _replayed(shared_model, tmp_path / "record", kv)


def _replayed(directory: Path, file: Path, kv: str) -> None:
    """By one rank: the same tokens; hits are cold there, too."""
    plan = tiny_plan(directory, kv)
    header, steps = read_recording(file)
    steps = list(steps)
    replay = Replay(build_engine(directory, plan).runner, plan, header, [g for step in steps for g in step.inputs])
    assert [difference for step in steps for difference in replay.step(step)] == []
    assert replay.report.tokens > 100


def _killed(world: ProcessWorld) -> None:
    """In the middle of an answer: the step fails, nothing is computed any more, and no process is left."""
    other = psutil.Process(world.followers.wires[0].peer.pid)
    world.engine.submit(ask("last", tokens_of(9, 100), 400))
    for _ in range(5):
        world.engine.step()
    os.kill(other.pid, signal.SIGKILL)
    with pytest.raises(RanksApart, match="rank 1"):
        for _ in range(400):
            world.engine.step()
    with pytest.raises(RanksApart, match="rank 1"):
        next(iter(generate(world.engine, [ask("another", tokens_of(1, 10), 1)]).values()))
    assert not psutil.wait_procs([other], timeout=60)[1]
