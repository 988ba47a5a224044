"""The watchdog in this process: nothing is said before a token, and only progress feeds it."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from kakera.contract.events import EngineStats, Finished, Usage
from kakera.errors import EngineDied
from kakera.plan.plan import Plan
from kakera.plan.speed import Speed
from kakera.run.interface import EngineLimits
from kakera.server import watchdog
from kakera.server.watch import EngineWatch
from kakera.service import limits
from kakera.service.notify import Notifier
from kakera.target.target import CPU, CUDA, Target


class Engine:
    """Generates a token when `gate` opens; reports afresh while it `reports`."""

    limits = EngineLimits(100, 1)

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.reports = True
        self.report = EngineStats()

    async def stream(self, request):
        await self.gate.wait()
        yield Finished(request.id, "length", Usage(1, 0, 1))

    def abort(self, request_id: str) -> None:
        raise AssertionError

    async def stats(self) -> EngineStats:
        if self.reports:
            self.report = EngineStats(running=self.report.running, steps=self.report.steps + 1)
        return self.report


@pytest.fixture
def heard(tmp_path: Path, monkeypatch):
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind("\0kakera-test-" + tmp_path.name + str(time.monotonic_ns()))
    receiver.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", "@" + receiver.getsockname()[1:].decode())
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.02)

    def take() -> list[str]:
        words = []
        while True:
            try:
                words += receiver.recv(4096).decode().splitlines()
            except BlockingIOError:
                return words

    yield take
    receiver.close()


def test_no_token_no_ready(heard) -> None:
    async def life() -> None:
        engine = Engine()
        with pytest.raises(EngineDied, match="generates nothing: no token within"):
            await watchdog.first_token(engine, 0.05)
        engine.gate.set()
        await watchdog.first_token(engine, 60)
        assert not heard()

    asyncio.run(life())


def test_fed_while_idle_and_while_working_and_not_by_an_old_report(heard) -> None:
    async def life() -> None:
        engine = Engine()
        watch = EngineWatch(engine, stall_seconds=1, poll_seconds=0.01)
        polling = asyncio.create_task(watch.run())
        attending = asyncio.create_task(watchdog.attendant(Notifier.from_environment(), "m answers")(watch))
        for running in (0, 2):
            engine.report = EngineStats(running=running)
            words: list[str] = []
            async with asyncio.timeout(60):
                while words.count("WATCHDOG=1") < 3 or f"STATUS=m answers; {running} running, 0 waiting" not in words:
                    await asyncio.sleep(0.02)
                    words += heard()
            assert ("READY=1" in words) == (running == 0), "once, at the start"
        engine.reports = False
        await asyncio.sleep(0.1)
        heard()
        with pytest.raises(EngineDied, match=r"no step finished .* 2 running"):
            await asyncio.wait_for(attending, 60)
        assert "WATCHDOG=1" not in heard()
        polling.cancel()

    asyncio.run(life())


def test_an_engine_that_was_idle_in_its_last_report_can_hang_too() -> None:
    async def life() -> None:
        engine = Engine()
        engine.reports = False
        watch = EngineWatch(engine)
        await watch.look()
        moved = watch.moved_at
        await asyncio.sleep(0.02)
        await watch.look()
        assert watch.moved_at == moved and watch.stalled_for > 0.01

    asyncio.run(life())


def test_nobody_listens(monkeypatch) -> None:
    Notifier(None).send("READY=1")
    Notifier("/nowhere/at/all").send("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Notifier.from_environment().send("READY=1")


def test_a_hang_is_told_by_the_predicted_step() -> None:
    def plan(target: Target, chunk: int) -> Plan:
        return Plan(*[None] * 2, target, *[None] * 5, chunk, *[None] * 7)  # type: ignore[arg-type,call-arg]

    fast, slow, mini = Speed(100.0, 100.0, 2000.0), Speed(1.0, 0.5, 64.0), Speed(70.0, 60.0, 250.0)
    assert limits.stall_seconds(plan(CPU, 512), fast) == 30
    assert limits.stall_seconds(plan(CPU, 512), mini) > 3 * 31, "on busy cores a sound step took 31 seconds"
    assert limits.stall_seconds(plan(CPU, 512), slow) == 60 * (8 + 2)
    assert limits.stall_seconds(plan(CUDA, 512), slow) == 10 * (8 + 2) + CUDA.patience.compile_seconds
    assert limits.stall_seconds(plan(CUDA, 512), Speed(None, None, None)) == 30 + CUDA.patience.compile_seconds
