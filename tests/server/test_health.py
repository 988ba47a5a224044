"""/health: progress, a token for those who want one, and no outage where there is only much to do."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import hang_up
from test_life import BODY, CHAT, SLOW

from kakera.server.operate import health


@pytest.fixture
def slow(serve):
    return serve(SLOW)


def test_health_and_its_deep_form(slow):
    assert slow.http.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    assert slow.http.get("/health?deep=1").json()["token_seconds"] >= 0
    assert slow.engine.requests[-1].sampling.max_tokens == 1


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_elsewhere_can_not_have_tokens_generated(slow, site):
    """What a browser sends for <img src="http://127.0.0.1:30000/health?deep=1"> on a page elsewhere."""
    headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    refused = slow.http.get("/health?deep=1", headers=headers)
    assert refused.status_code == 403 and refused.json()["error"]["param"] == "deep"
    assert slow.http.get("/health", headers=headers).status_code == 200
    assert slow.engine.requests == []


@pytest.mark.parametrize("headers", [{}, {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin"}])
def test_watchdogs_and_routers_and_their_users_may(slow, headers):
    assert slow.http.get("/health?deep=1", headers=headers).json()["status"] == "ok"


def test_deep_probes_share_a_token(slow, monkeypatch):
    monkeypatch.setattr(health, "SHARED_SECONDS", 60)
    slow.engine.prefill_seconds = 0.3
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: slow.http.get("/health?deep=1").json(), range(40)))
    assert len(slow.engine.requests) == 1 and all(answer["token_seconds"] >= 0.3 for answer in answers)
    monkeypatch.setattr(health, "SHARED_SECONDS", 0)
    slow.http.get("/health?deep=1")
    assert len(slow.engine.requests) == 2, "an old answer says nothing"


def test_a_queue_of_minutes_is_no_outage_while_steps_finish(serve, monkeypatch):
    monkeypatch.setattr(health, "SHARED_SECONDS", 0)
    server, seen = serve(SLOW, slots=1, stall_seconds=1), threading.Event()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as left:
        left.callback(seen.set)
        for _ in range(2):
            pool.submit(hang_up, server.url, CHAT, BODY, seen.is_set)
        server.wait_until(lambda: server.engine.waiting == 1)
        answer = server.http.get("/health?deep=1").json()
        assert (answer["status"], answer["running"], answer["waiting"]) == ("ok", 1, 1)
        assert len(server.engine.requests) == 2, "the probe asks for no token of its own"
        server.engine.stuck = True
        server.wait_until(lambda: "the engine hangs" in server.http.get("/health?deep=1").json().get("reason", ""))
        server.engine.stuck = False


def test_whoever_leaves_a_shared_probe_does_not_end_it(slow, monkeypatch):
    monkeypatch.setattr(health, "SHARED_SECONDS", 60)
    slow.engine.prefill_seconds = 0.5
    hang_up(slow.url, "/health?deep=1", None, lambda: slow.engine.open)
    assert slow.http.get("/health?deep=1").status_code == 200
    assert len(slow.engine.requests) == 1 and slow.engine.aborted == []


def test_work_without_progress_is_an_outage(serve):
    server = serve(SLOW, stall_seconds=0.4)
    server.engine.stuck = True
    time.sleep(0.6)
    assert server.http.get("/health").status_code == 200  # idle is not stalled
    threading.Thread(target=lambda: server.post("/v1/chat/completions", **BODY, max_tokens=2)).start()
    server.wait_until(lambda: server.http.get("/health").status_code == 503)
    assert "no step finished" in server.http.get("/health").json()["reason"]
    server.engine.stuck = False
    server.wait_until(lambda: server.http.get("/health").status_code == 200 and not server.engine.open)
    server.engine.stuck = True
    assert server.http.get("/health?deep=1").status_code == 503
