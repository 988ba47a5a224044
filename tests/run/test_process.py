"""The engine process, for real: streams, refusals, and every way in which one of the two processes may go."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from engine_recipes import BrokenRecipe, HeldRecipe, TinyRecipe
from run_world import World, ask, tokens_of

from kakera.contract.events import Finished, Flushed, Progress, Tokens
from kakera.errors import EngineDied, KakeraError, RequestRefused
from kakera.run.process.client import UNREAD_TOKENS, EngineClient
from kakera.run.scripted import ScriptedRecipe
from kakera.server.operate.health import DeepProbe
from kakera.server.watch import EngineWatch

HERE = Path(__file__).parent


async def collect(client, request):
    events = [event async for event in client.stream(request)]
    assert isinstance(events[-1], Finished)
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens], events[-1]


async def until(client, reached, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not reached(stats := await client.stats()):
            await asyncio.sleep(0.01)
    return stats


async def until_idle(client, seconds=60.0):
    deadline = time.monotonic() + seconds
    while (stats := await client.stats()).running or stats.waiting:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.02)
    return stats


@pytest.fixture(autouse=True)
def temporary(monkeypatch):
    """A temporary folder of our own with a short name: the path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield
        monkeypatch.setattr(tempfile, "tempdir", None)


def left_behind():
    return set(Path(tempfile.gettempdir()).glob("kakera-*"))


EARLIER: set[int] = set()  # children that other test modules keep for their own use


@pytest.fixture(autouse=True)
def earlier():
    EARLIER.clear()
    EARLIER.update(child.pid for child in psutil.Process().children(recursive=True))


def engines():
    """Children that a test left; multiprocessing's resource tracker stays for the life of this process."""
    children = [c for c in psutil.Process().children(recursive=True) if c.pid not in EARLIER]
    return [c for c in children if "resource_tracker" not in " ".join(c.cmdline())]


def test_threads_streams_refusals_and_departures_of_a_real_engine(tiny_model, monkeypatch):
    """One engine process for all of it: starting one takes seconds."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    asyncio.run(_life(tiny_model))
    assert not engines()


async def _life(tiny_model):
    client = await EngineClient.start(TinyRecipe(tiny_model), computes=True)
    try:
        _threads(client)
        (directory,) = left_behind()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (client.limits.context, client.limits.max_waiting) == (2048, 2)
        await _several_at_once(client, tiny_model)
        await _refusals(client)
        await _unread(client)
        await _leaving(client)
        await _flushing(client)
        await _sweeping(client)
        await _sleeping(client, tiny_model)
        await _killed(client)
    finally:
        await client.close()
    await client.close()
    assert not left_behind()


async def _sleeping(client, tiny_model):
    """One that runs stands still and goes on with the same text; told twice, in order, and shown."""
    request = ask("sleeps", tokens_of(5, 300), 60)
    asked = asyncio.create_task(collect(client, request))
    await until(client, lambda stats: stats.running)
    states = await asyncio.gather(client.sleep(1), client.sleep(2), client.wake_up(), client.wake_up(), client.sleep(1))
    assert [state.level for state in states] == [1, 2, 0, 0, 1]
    stats = await client.stats()
    assert (stats.asleep, stats.running, stats.waiting, stats.idle) == (1, 0, 1, True) and not asked.done()
    seen = stats.at
    await until(client, lambda stats: stats.at > seen)  # it reports in its sleep
    assert (await client.wake_up()).level == 0
    tokens, _ = await asked
    assert tokens == World.build(tiny_model).one(request).tokens


def _threads(client):
    """They sleep while they wait, and run on any core."""
    if not Path("/proc/self/task").exists():
        return  # not Linux
    environment = Path(f"/proc/{client.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_WAIT_POLICY=passive" in environment and "OMP_WAIT_POLICY" not in os.environ
    masks = [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{client.pid}/task").iterdir()]
    assert masks and all(mask == os.sched_getaffinity(0) for mask in masks)


async def _several_at_once(client, tiny_model):
    requests = [ask(f"r{n}", tokens_of(n, n), 5) for n in (20, 100, 300)]
    answers = await asyncio.gather(*(collect(client, request) for request in requests))
    local = World.build(tiny_model).answer(*requests)
    assert [tokens for tokens, _ in answers] == [completion.tokens for completion in local]
    stats = await until_idle(client)
    assert stats.slots_free == 4 and stats.pages_free == stats.pages_total


async def _refusals(client):
    with pytest.raises(RequestRefused) as too_long:
        await collect(client, ask("long", tokens_of(1, 3000)))
    assert (too_long.value.status, too_long.value.code) == (400, "context_length_exceeded")
    many = [ask(f"many{i}", tokens_of(i, 100), 40) for i in range(12)]
    answers = await asyncio.gather(*(collect(client, request) for request in many), return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RequestRefused)]
    assert refused and {(r.status, r.code) for r in refused} == {(429, "queue_full")}
    served = [answer for answer in answers if not isinstance(answer, RequestRefused)]
    assert len(served) >= 4 + 2 and {finished.reason for _, finished in served} == {"length"}

    first = asyncio.create_task(collect(client, ask("twice", tokens_of(1, 50), 30)))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match="not finished"):
        await collect(client, ask("twice", tokens_of(2, 50), 30))
    tokens, finished = await asyncio.wait_for(first, 60)
    assert len(tokens) == 30 and finished.reason == "length", "the first one must not pay for the second"


async def _unread(client):
    """What waits for a reader has a bound, whatever the machine's speed; others go on, and nothing is lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kakera.run.process.client.UNREAD_TOKENS", 16)
        events = client.stream(ask("unread", tokens_of(1, 100), 90))
        first = [await anext(events) for _ in range(3)]
        stats = await until(client, lambda stats: stats.paused == 1)
        (active,) = stats.active
        assert active.id == "unread" and active.generated <= 16 + 3
        assert client._streams["unread"].qsize() <= 16
        answers = await asyncio.gather(*(collect(client, ask(f"beside{n}", tokens_of(n, 50), 40)) for n in range(4)))
        assert [len(tokens) for tokens, _ in answers] == [40] * 4, "one of them needed its slot"
        rest = first + [event async for event in events]
    tokens = [token for event in rest if isinstance(event, Tokens) for token in event.tokens]
    whole, _ = await collect(client, ask("whole", tokens_of(1, 100), 90))
    assert tokens == whole and rest[-1].reason == "length"


async def _leaving(client):
    endless = ask("endless", tokens_of(1, 300), 1700)
    stream = client.stream(endless)
    kinds = [type(await anext(stream)) for _ in range(6)]
    assert kinds[0] is Progress and kinds[-1] is Tokens
    steps = (await client.stats()).steps
    await stream.aclose()
    stats = await until_idle(client)
    assert stats.steps - steps < 1000 and stats.slots_free == 4, "1,700 steps were ahead"
    stopping = asyncio.create_task(collect(client, endless))
    await asyncio.sleep(0.1)
    client.abort("endless")
    client.abort("unknown")
    tokens, finished = await asyncio.wait_for(stopping, 60)
    assert finished.reason == "abort" and finished.usage.completion_tokens == len(tokens) < 1700


async def _flushing(client):
    await collect(client, ask("cached", tokens_of(1, 300), 1))
    _, again = await collect(client, ask("again", tokens_of(1, 300), 1))
    assert (await client.stats()).host_bytes_used > 0
    first, second = await asyncio.gather(client.flush(), client.flush())
    flushed = await client.stats()
    assert flushed.host_bytes_used == 0 and not any(flushed.host_bytes.values()), "it must not wait for the next report"
    assert flushed.pages_cached == 0
    assert again.usage.cached_tokens > 0 and first.pages > 0 and (second.pages, second.host_bytes) == (0, 0)
    _, after = await collect(client, ask("after", tokens_of(1, 300), 1))
    assert after.usage.cached_tokens == 0 and after.usage.miss_reason == "evicted pages"


async def _sweeping(client):
    """In order with flushes, and while a stream runs."""
    stream = asyncio.create_task(collect(client, ask("beside", tokens_of(7, 100), 8)))
    (reads, flushed, again), (tokens, _) = await asyncio.gather(
        asyncio.gather(client.sweep(), client.flush(), client.sweep()), stream
    )
    assert isinstance(flushed, Flushed) and len(tokens) == 8
    assert [read.bytes for read in reads] == [read.bytes for read in again]


async def _killed(client):
    """In its sleep, too: who is kept hears of it."""
    kept = asyncio.create_task(collect(client, ask("kept", tokens_of(9, 50), 1900)))
    await until(client, lambda stats: stats.running)
    assert (await client.sleep(1)).level == 1
    waiting = [asyncio.create_task(collect(client, ask(f"w{i}", tokens_of(i, 50), 1900))) for i in range(3)]
    await asyncio.sleep(0.2)
    os.kill(client.pid, signal.SIGKILL)
    for outcome in await asyncio.wait_for(asyncio.gather(kept, *waiting, return_exceptions=True), 60):
        assert isinstance(outcome, EngineDied) and "-9" in str(outcome) and outcome.exit_status == 70
    assert await asyncio.wait_for(client.died(), 60) == -signal.SIGKILL
    for call in (client.stats(), client.wake_up(), collect(client, ask("late", tokens_of(1, 5)))):
        with pytest.raises(EngineDied):
            await call


@pytest.mark.parametrize(
    ("error", "text", "status"),
    [("words", "the file x is truncated", 1), ("defect", "a defect", 70), ("exit", "exit code 3", 70)],
)
def test_an_engine_that_can_not_start_says_why(error, text, status):
    with pytest.raises(KakeraError, match=text) as refusal:
        asyncio.run(EngineClient.start(BrokenRecipe(error)))
    assert refusal.value.exit_status == status
    assert not left_behind() and not engines()


def test_a_build_function_that_can_not_be_sent_leaves_nothing(tiny_model):
    with pytest.raises(Exception, match="pickle"):
        asyncio.run(EngineClient.start(lambda: None))
    assert not left_behind() and not engines()


def test_the_engine_goes_when_its_parent_is_killed(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"streams": [{"text": "word"}]}))
    command = [sys.executable, str(HERE / "engine_recipes.py"), str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        engine = psutil.Process(int(process.stdout.readline()))
        assert engine.is_running() and engine.ppid() == process.pid
        process.kill()
        psutil.wait_procs([engine], timeout=60)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_an_engine_whose_readers_all_wait_sleeps_and_says_so(tmp_path):
    """It reports once a second as an idle one does, uses no processor, and takes what comes."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"streams": [{"text": "word " * 5000}], "context": 8192}))

    async def unread():
        client = await EngineClient.start(ScriptedRecipe(script))
        try:
            streams = [client.stream(ask(f"r{i}", [1, 2, 3], 600)) for i in range(12)]
            for stream in streams:
                await anext(stream)
            stats = await until(client, lambda stats: stats.idle)
            waiting = sum(queue.qsize() for queue in client._streams.values())
            assert stats.paused == 12 and waiting <= 12 * UNREAD_TOKENS
            process = psutil.Process(client.pid)
            used, watch = process.cpu_times(), EngineWatch(client)
            for _ in range(2):
                moved = watch.moved_at
                async with asyncio.timeout(60):
                    while watch.moved_at == moved:
                        await asyncio.sleep(0.5)
                        assert (await watch.look()).steps == stats.steps
            assert sum(process.cpu_times()[:2]) - sum(used[:2]) < 1
            problem, _ = await DeepProbe(watch).result()
            assert problem is None, "no slot was free"
            counts = [sum(1 for e in [e async for e in stream] if isinstance(e, Tokens)) for stream in streams]
            assert counts == [600] * 12, "what was read before says that its prompt is read"
        finally:
            await client.close()

    asyncio.run(unread())


def test_what_is_sent_shows_at_once_also_during_a_long_step(tmp_path):
    """The first step of the first request takes until we let it end; the others come while it runs."""
    script, end = tmp_path / "script.json", tmp_path / "end"
    script.write_text(json.dumps({"streams": [{"text": "word " * 5}], "context": 8192}))

    async def life():
        client = await EngineClient.start(HeldRecipe(script, end))
        try:
            first = asyncio.create_task(collect(client, ask("first", tokens_of(1, 300), 1)))
            stats = await until(client, lambda stats: stats.running)
            (active,) = stats.active
            assert (active.id, active.done, active.target, stats.steps) == ("first", 0, 300, 0)
            assert active.later(2.0).seconds == active.seconds + 2.0 and active.later(2.0).decode_seconds == 0.0
            leaving = asyncio.create_task(collect(client, ask("leaving", tokens_of(2, 100), 1)))
            others = [asyncio.create_task(collect(client, ask(f"o{n}", tokens_of(n, 100), 1))) for n in range(2)]
            stats = await until(client, lambda stats: stats.waiting == 3)
            assert (stats.running, stats.steps) == (1, 0), "the first step has not ended"
            report, watch = stats.at, EngineWatch(client)
            await watch.look()
            moved = watch.moved_at
            leaving.cancel()
            stats = await until(client, lambda stats: stats.waiting == 2)
            await watch.look()
            assert stats.at == report and watch.moved_at == moved, "what we send is no progress"
            end.touch()
            await asyncio.gather(first, *others)
            assert (await until_idle(client)).waiting == 0
            with pytest.raises(RequestRefused):
                await collect(client, ask("long", tokens_of(1, 9000)))
            stats = await client.stats()
            assert (stats.running, stats.waiting) == (0, 0)
        finally:
            await client.close()

    asyncio.run(life())


def test_closing_ends_streams_that_wait_and_starting_again_leaks_nothing(tmp_path):
    """The scripted engine imports no torch, so a cycle takes a fraction of a second."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"streams": [{"text": "word " * 900, "delay_ms": 5}]}))

    async def cycle():
        client = await EngineClient.start(ScriptedRecipe(script))
        waiting = asyncio.create_task(collect(client, ask("w", [1, 2, 3], 900)))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(EngineDied):
            await asyncio.wait_for(waiting, 60)
        assert await asyncio.wait_for(client.died(), 60) == -signal.SIGTERM

    async def cycles(count):
        for _ in range(count):
            await cycle()

    process = psutil.Process()
    asyncio.run(cycles(1))
    gc.collect()
    descriptors, threads = process.num_fds(), process.num_threads()
    asyncio.run(cycles(2))  # one that stays behind each time would be two
    gc.collect()
    assert process.num_fds() <= descriptors + 1 and process.num_threads() <= threads + 1
    assert not left_behind() and not engines()


def test_a_crash_in_native_code_says_where():
    crash = (
        "import faulthandler; from kakera.run.process.engine_process import show_crashes; "
        "show_crashes(); faulthandler._sigsegv()"
    )
    done = subprocess.run([sys.executable, "-c", crash], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV and "Segmentation fault" in done.stderr and "File" in done.stderr
