"""Many clients at once, and clumsy ones: everybody is answered, and nothing is held afterwards."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from command_server import CommandServer

SLOTS = "kakera_slots_free 8.0"


def test_two_hundred_requests_at_once_beside_half_sent_ones_are_all_answered(scripted: CommandServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", scripted.port)))
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
        url = f"http://127.0.0.1:{scripted.port}/v1/completions"
        with ThreadPoolExecutor(200) as pool:
            apart = {"timeout": 60, "verify": False}  # a client each; certificates would be read 200 times
            ask = [pool.submit(httpx.post, url, json={"prompt": f"hi {i}"}, **apart) for i in range(200)]
            assert {answer.result().status_code for answer in ask} == {200}


def test_clients_that_leave_at_random_moments_leave_nothing_behind(scripted: CommandServer) -> None:
    rng = random.Random(0)
    url = f"http://127.0.0.1:{scripted.port}/v1/completions"

    def leave(number: int, patience: float) -> None:
        body = {"prompt": "slow " * (1 + number % 100), "stream": number % 2 == 0, "n": 1 + number % 3}
        left = contextlib.suppress(httpx.ReadTimeout)
        with left, httpx.stream("POST", url, json=body, timeout=patience, verify=False) as answer:
            next(answer.iter_lines())

    with ThreadPoolExecutor(20) as pool:
        for done in [pool.submit(leave, i, rng.uniform(0.02, 0.6)) for i in range(40)]:
            done.result()
    for _ in range(1000):
        if SLOTS in (text := scripted.http.get("/metrics").text) and "kakera_waiting 0.0" in text:
            break
        time.sleep(0.02)
    assert SLOTS in text and "kakera_waiting 0.0" in text
    assert scripted.chat("hi").status_code == 200
