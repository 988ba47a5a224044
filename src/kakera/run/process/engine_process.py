"""The engine process: builds an engine, then serves one pair socket until its parent goes or says so."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import zmq

from kakera.contract.events import EngineStats, Event
from kakera.errors import KakeraError, RequestRefused
from kakera.run.engine import LocalEngine
from kakera.run.process.messages import (
    Abort,
    Accepted,
    Alive,
    Allow,
    Failed,
    Flush,
    FlushDone,
    Ready,
    Refused,
    Sleep,
    SleepDone,
    SleepRefused,
    Step,
    Submit,
    Sweep,
    SweepDone,
    WakeUp,
    decode_to_engine,
    encode,
)

log = logging.getLogger(__name__)
ALIVE_SECONDS = 1.0
FETCHING_SECONDS = 0.002  # between looks at what the disk has brought
KEEP_SECONDS = 10.0  # for what goes to the disk at the end


def engine_main(endpoint: str, parent: int, build: Callable[[], LocalEngine]) -> None:
    """Entry of the child process. Exits 70 if the engine breaks; the client sees the process end."""
    show_crashes()
    die_with_parent(parent)
    # the server decides when we stop: its client has blocked Ctrl-C for us, but a library may unblock it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(endpoint)
    try:
        engine = build()
    except Exception as error:
        status = error.exit_status if isinstance(error, KakeraError) else 70
        if status == 70:
            log.exception("the engine could not start")
        text = str(error) if isinstance(error, KakeraError) else f"the engine could not start: {error!r}"
        socket.send(encode(Failed(text, status)))
        socket.close(linger=2000)
        sys.exit(status)
    settle()
    stopping = threading.Event()
    if engine.keeps:  # else SIGTERM ends the process at once
        signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    socket.send(encode(Ready(engine.limits, engine.stats())))
    try:
        serve(engine, socket, stopping)
        engine.keep(KEEP_SECONDS)
    except Exception:
        log.exception("the engine died")
        sys.exit(70)


def serve(engine: LocalEngine, socket: zmq.Socket[bytes], stopping: threading.Event) -> None:
    """One thread, one loop: read messages, run a step, send events. Until `stopping`, which is heard between steps."""

    def planned(events: list[Event]) -> None:
        socket.send(encode(Step.of(events, engine.stats())))

    last_sent = 0.0
    nap = 0.0
    while not stopping.is_set():
        if nap:
            socket.poll(int(nap * 1000))
        _receive(engine, socket)
        events = engine.step(planned)
        stats = engine.stats()
        nap = _nap(engine, stats)
        now = time.monotonic()
        if events:
            socket.send(encode(Step.of(events, stats)))
            last_sent = now
        elif now - last_sent >= ALIVE_SECONDS:
            socket.send(encode(Alive(stats)))
            last_sent = now
        engine.announce()


def _nap(engine: LocalEngine, stats: EngineStats) -> float:
    """Seconds for which nothing is to be done, unless a message comes."""
    if stats.running > stats.paused:
        return 0.0
    if engine.fetching:
        return FETCHING_SECONDS
    return ALIVE_SECONDS if stats.idle else 0.0


def _receive(engine: LocalEngine, socket: zmq.Socket[bytes]) -> None:
    while True:
        try:
            message = decode_to_engine(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return
        match message:
            case Submit() as submit:
                try:
                    engine.submit(submit.request, submit.allowed)
                    socket.send(encode(Accepted(submit.head.id)))
                except RequestRefused as r:
                    socket.send(encode(Refused(submit.head.id, str(r), r.status, r.code, r.param)))
            case Allow(request_id, tokens):
                engine.allow(request_id, tokens)
            case Abort(request_id):
                engine.abort(request_id)
            case Flush(disk):
                socket.send(encode(FlushDone(engine.flush(disk), engine.stats())))
            case Sweep():
                socket.send(encode(SweepDone(engine.sweep())))
            case Sleep() | WakeUp() as wish:
                socket.send(encode(_sleep_or_wake(engine, wish, socket)))


def _sleep_or_wake(engine: LocalEngine, wish: Sleep | WakeUp, socket: zmq.Socket[bytes]) -> SleepDone | SleepRefused:
    """Says now and then that it goes on: weights may be read from a slow disk."""

    def going_on(done: int, total: int) -> None:
        socket.send(encode(Alive(engine.stats())))

    try:
        state = engine.sleep(wish.level) if isinstance(wish, Sleep) else engine.wake_up(going_on)
    except RequestRefused as refused:
        log.warning("%s", refused)
        return SleepRefused(str(refused), refused.status, refused.code)
    return SleepDone(state, engine.stats())


def settle() -> None:
    """Have the garbage collector pass over all that start-up has made, which stays: else it walks it every now and
    then, 40 ms in the server and 100 in an engine with torch, and whoever waits for a token just then waits longer."""
    gc.collect()
    gc.freeze()


def show_crashes() -> None:
    """Have a crash in native code say on stderr where each thread stood; the process dies of it as before."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent dies, even by SIGKILL (Linux; elsewhere do nothing)."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
    if os.getppid() != parent:  # it died before the call above
        os._exit(70)
