"""A server that lends its card: who waits, who is refused, who wakes it, in whatever order it is told."""

import asyncio
import contextlib

import httpx
import pytest
from fake_engine import FakeEngine
from test_drain import NEW

from kakera.contract.events import SleepState
from kakera.errors import EngineDied, RequestRefused
from kakera.server.app import create_app
from kakera.server.http.access import Access
from kakera.server.http.sleep import IdleSleep, Sleep, memory_asleep

WORDS = [{"text": "a word and another one"}]


class Napper:
    """An engine that only sleeps, as slowly as it is let."""

    def __init__(self):
        self.level = 0
        self.told: list[str] = []
        self.refusal: Exception | None = None
        self.let = asyncio.Event()
        self.let.set()

    async def sleep(self, level):
        return await self._become(f"sleep {level}", max(level, self.level))

    async def wake_up(self):
        return await self._become("wake", 0)

    async def _become(self, said, level):
        self.told.append(said)
        await self.let.wait()
        if self.refusal is not None:
            raise self.refusal
        self.level = level
        return SleepState(level)


class Played:
    """A Sleep over a Napper, and tasks that wait for it."""

    def __init__(self):
        self.engine = Napper()
        self.errors: list[Exception] = []
        self.sleep = Sleep(self.engine, self._interrupt)  # type: ignore[arg-type]

    def _interrupt(self, error):
        self.errors.append(error)
        while self.sleep.inside:
            self.sleep.leave()

    async def start(self, work):
        task = asyncio.ensure_future(work)
        await settled()
        return task

    async def refused(self, work, status, code):
        with pytest.raises(RequestRefused) as refused:
            await work
        assert (refused.value.status, refused.value.code) == (status, code)


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


def play(story):
    asyncio.run(asyncio.wait_for(story(Played()), 30))


def test_who_is_inside_ends_first_and_who_comes_is_refused():
    async def story(it):
        await it.sleep.enter()
        falling = await it.start(it.sleep.fall(1, "wait", False))
        assert it.sleep.closed and not falling.done() and it.engine.told == [] and "falls asleep" in it.sleep.text
        await it.refused(it.sleep.enter(), 503, "asleep")
        it.sleep.leave()
        assert (await falling).level == it.sleep.level == 1 and "POST /wake_up" in it.sleep.text
        await it.refused(it.sleep.enter(), 503, "asleep")
        assert (await it.sleep.wake()).level == it.sleep.level == 0
        await it.sleep.enter()

    play(story)


@pytest.mark.parametrize(("mode", "ended"), [("keep", 0), ("abort", 1)])
def test_who_is_inside_is_not_waited_for(mode, ended):
    """Also if that was said by a second call, while the first one waits."""

    async def story(it):
        await it.sleep.enter()
        first = await it.start(it.sleep.fall(1, "wait", False))
        second = await it.sleep.fall(2, mode, False)
        assert second.level == it.sleep.level == 2 and (await first).level == 2
        assert len(it.errors) == ended and sorted(it.engine.told) == ["sleep 1", "sleep 2"]
        assert it.sleep.inside == 1 - ended

    play(story)


def test_sleeping_or_waking_again_changes_nothing_but_how_deep():
    async def story(it):
        assert (await it.sleep.wake()).level == 0 and it.engine.told == []
        for level, found in ((1, 1), (1, 1), (2, 2), (1, 2)):
            assert (await it.sleep.fall(level, "wait", False)).level == it.sleep.level == found
        assert [(await it.sleep.wake()).level for _ in range(2)] == [0, 0] and it.engine.told.count("wake") == 1

    play(story)


def test_the_log_says_what_a_sleep_holds_in_words_that_a_cpu_can_keep():
    assert memory_asleep(SleepState(1)) == ""
    assert memory_asleep(SleepState(2, 0.1, 600_000_000)) == ": 0.60 GB of the card are in use by all programs"
    both = ": 0.60 GB of the card are in use by all programs and 8.90 GB of host memory hold the weights"
    assert memory_asleep(SleepState(1, 0.1, 600_000_000, 8_900_000_000)) == both


def test_waking_wins_over_a_sleep_that_still_waits():
    async def story(it):
        await it.sleep.enter()
        falling = await it.start(it.sleep.fall(1, "wait", False))
        assert (await it.sleep.wake()).level == 0
        await it.refused(falling, 409, "woken")
        assert it.engine.told == [] and not it.sleep.closed

    play(story)


def test_waking_in_the_middle_of_falling_asleep_comes_behind_it():
    async def story(it):
        it.engine.let.clear()
        falling = await it.start(it.sleep.fall(1, "wait", False))
        waking = await it.start(it.sleep.wake())
        again = await it.start(it.sleep.fall(2, "wait", False))
        assert it.engine.told == ["sleep 1"]
        it.engine.let.set()
        assert (await falling).level == 1 and (await waking).level == 0 and (await again).level == 2
        assert it.engine.told == ["sleep 1", "wake", "sleep 2"] and it.sleep.closed

    play(story)


def test_requests_wake_it_once_if_they_may():
    async def story(it):
        await it.sleep.fall(1, "wait", True)
        it.engine.let.clear()
        coming = [await it.start(it.sleep.enter()) for _ in range(3)]
        assert it.engine.told == ["sleep 1", "wake"] and it.sleep.inside == 0 and "next request" in it.sleep.text
        it.engine.let.set()
        await asyncio.gather(*coming)
        assert it.engine.told == ["sleep 1", "wake"] and it.sleep.inside == 3 and not it.sleep.closed
        it.sleep.leave()
        await it.sleep.fall(1, "keep", True)
        await it.sleep.fall(1, "keep", False)  # lent for good
        await it.refused(it.sleep.enter(), 503, "asleep")

    play(story)


@pytest.mark.parametrize("error", [RequestRefused("no room", status=503, code="no_room"), EngineDied("gone")])
def test_what_fails_leaves_it_as_it_was(error):
    async def story(it):
        it.engine.refusal = error
        with pytest.raises(type(error)):
            await it.sleep.fall(1, "wait", True)
        assert not it.sleep.closed
        it.engine.refusal = None
        await it.sleep.fall(1, "wait", True)
        it.engine.refusal = error
        for work in (it.sleep.wake, it.sleep.enter):
            with pytest.raises(type(error)):
                await work()
        assert it.sleep.level == 1 and it.sleep.inside == 0

    play(story)


def test_it_sleeps_when_nobody_asks_and_tries_again_what_was_refused():
    async def story(it):
        await it.sleep.enter()
        it.engine.refusal = RequestRefused("no room", status=503)
        idle = asyncio.create_task(it.sleep.when_idle(IdleSleep(0.02, 2)))
        await asyncio.sleep(0.1)
        assert it.engine.told == []  # somebody is inside
        it.sleep.leave()
        while len(it.engine.told) < 2:
            await asyncio.sleep(0.01)
        it.engine.refusal = None
        while not it.sleep.level:
            await asyncio.sleep(0.01)
        assert set(it.engine.told) == {"sleep 2"}
        await it.sleep.enter()
        assert it.sleep.level == 0
        it.engine.refusal = EngineDied("gone")
        it.sleep.leave()
        await idle

    play(story)


def over_http(model, path, story, **options):
    """`story` gets a client of an app, the engine, and the app's service."""

    async def run():
        engine = FakeEngine(path / "script.json", WORDS)
        app = create_app(engine, model, **options)
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 50000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20) as http:
            await story(http, engine, app.state.service)

    asyncio.run(asyncio.wait_for(run(), 60))


async def generating(engine):
    while not engine.open:
        await asyncio.sleep(0.01)


def test_what_a_server_that_sleeps_says(model, tmp_path):
    async def story(http, engine, service):
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False, "level": 0}
        slept = {"is_sleeping": True, "level": 1, "seconds": 0.5, "device_bytes": 7 * 10**8, "host_bytes": 10**10}
        assert (await http.post("/sleep")).json() == slept
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True, "level": 1}
        health = await http.get("/health")
        assert health.status_code == 503 and health.json() == {"status": "asleep", "running": 0, "waiting": 0}
        alive = await http.get("/health?ready=0&deep=1")  # and no token is generated
        assert alive.json() == {"status": "asleep", "running": 0, "waiting": 0} and engine.requests == []
        assert (await http.get("/server_info")).json()["status"] == "asleep"
        assert "kakera_asleep 1.0" in (await http.get("/metrics")).text
        (warning,) = (await http.get("/v1/kakera/status")).json()["warnings"]
        assert "requests are refused until POST /wake_up" in warning
        assert (await http.post("/tokenize", json={"prompt": "hi"})).status_code == 200
        assert (await http.post("/flush_cache")).status_code == 200
        for route, body in NEW.items():
            refused = await http.post(route, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "30"), route
            error = refused.json()["error"]
            assert error["type"] == "api_error" if route == "/v1/messages" else error["code"] == "asleep"
        assert (await http.post("/sleep?level=2&wake_on_request=true")).json()["level"] == 2
        assert (await http.get("/health")).json()["status"] == "asleep"  # 200: whoever asks is served
        for wrong in ("level=3", "level=0", "mode=now"):
            assert (await http.post(f"/sleep?{wrong}")).status_code == 400
        answer = await http.post("/v1/completions", json={"prompt": "hi"})
        assert answer.json()["choices"][0]["text"] == "a word and another one" and engine.asleep == 0
        assert (await http.get("/health")).json()["status"] == "ok"
        assert (await http.post("/wake_up?tags=weights")).json()["is_sleeping"] is False

    over_http(model, tmp_path, story)


def test_an_option_in_the_wrong_place_is_refused_and_not_dropped(model, tmp_path):
    async def story(http, engine, service):
        for route, body, words in (
            ("/sleep", {"level": 2}, "/sleep?level="),
            ("/sleep?level=1", {"mode": "keep"}, "query"),
            ("/drain?seconds=600", None, "seconds: goes into the body"),
            ("/drain?seconds=600", {"seconds": 600}, "seconds: goes into the body"),
            ("/flush_cache?disk=true", None, "disk: goes into the body"),
        ):
            answer = await http.post(route, json=body) if body else await http.post(route)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], route
        assert engine.asleep == 0 and not service.drain.began
        for empty in ("", "{}", " null "):
            assert (await http.post("/sleep?level=2", content=empty)).json()["level"] == 2

    over_http(model, tmp_path, story)


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_a_stream_that_runs_when_the_card_is_lent(model, tmp_path, mode):
    async def story(http, engine, service):
        engine.stuck = True
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi", "stream": True}))
        await generating(engine)
        lent = asyncio.create_task(http.post(f"/sleep?mode={mode}"))
        if mode == "wait":
            await asyncio.sleep(0.05)
            assert not lent.done() and (await http.get("/health")).json()["status"] == "asleep"
            engine.stuck = False
        assert (await lent).json()["level"] == engine.asleep == 1
        engine.stuck = False
        assert asked.done() == (mode != "keep")
        await http.post("/wake_up")
        text = (await asked).text
        assert ('"code":"asleep"' in text) == (mode == "abort") == (not text.endswith("data: [DONE]\n\n"))
        assert (engine.aborted != []) == (mode == "abort")
        again = await http.post("/v1/completions", json={"prompt": "hi"})
        assert again.status_code == 200

    over_http(model, tmp_path, story)


def test_a_server_that_sleeps_drains_at_once_and_gives_up_whom_it_kept(model, tmp_path):
    async def story(http, engine, service):
        engine.stuck = True
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi"}))
        await generating(engine)
        await http.post("/sleep?mode=keep")
        assert (await http.post("/drain", json={"seconds": 0})).json()["requests"] == 1
        assert (await asked).status_code == 503 and service.drain.over.is_set() and engine.asleep == 1

    over_http(model, tmp_path, story)

    async def nobody_inside(http, engine, service):
        await http.post("/sleep")
        await http.post("/drain", json={"seconds": 600})
        assert service.drain.over.is_set()

    over_http(model, tmp_path, nobody_inside)


def test_a_death_of_the_engine_is_seen_while_it_sleeps(model, tmp_path):
    async def story(http, engine, service):
        await http.post("/sleep?wake_on_request=1")
        engine.dead = True
        for work in (http.get("/health"), http.post("/wake_up"), http.post("/v1/completions", json={"prompt": "hi"})):
            assert (await work).status_code == 503

    over_http(model, tmp_path, story)


def test_who_may_lend_the_card(model, tmp_path):
    """(address, headers, status): without keys this machine alone, with keys whoever has one."""
    key, page = {"x-api-key": "k"}, {"origin": "http://evil.example"}
    cases = {
        (): [("10.0.0.7", {}, 403), ("127.0.0.1", page, 403), ("127.0.0.1", {}, 200)],
        ("k",): [("127.0.0.1", {}, 401), ("10.0.0.7", key, 200)],
    }

    async def ask(keys):
        app = create_app(FakeEngine(tmp_path / "script.json", WORDS), model, access=Access(keys=keys))
        for address, headers, expected in cases[keys]:
            transport = httpx.ASGITransport(app, client=(address, 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
                for route in ("/sleep", "/wake_up"):
                    assert (await http.post(route)).status_code == expected, (address, headers)
                if keys:
                    assert (await http.get("/is_sleeping")).status_code == expected

    for keys in cases:
        asyncio.run(ask(keys))


def test_an_idle_server_lends_its_card_and_answers_the_next_request(model, tmp_path):
    async def run():
        engine = FakeEngine(tmp_path / "script.json", WORDS)
        app = create_app(engine, model, idle_sleep=IdleSleep(0.05, 2))
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 50000))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            for _ in range(2):
                while not engine.asleep:
                    await asyncio.sleep(0.01)
                assert (await http.post("/v1/completions", json={"prompt": "hi"})).status_code == 200

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(run(), 60))
