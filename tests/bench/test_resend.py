"""The resend bench on a short conversation: real server, real engine process, a script for a model."""

import asyncio

import pytest

from kakera.bench.client import Client
from kakera.bench.resend import resend, scripted_server, step_cost
from kakera.bench.text import Prose


@pytest.fixture(scope="module")
def found():
    async def measure(url):
        async with Client(url) as client:
            return await resend(client, Prose(), tokens=6000, messages=12, times=2)

    with scripted_server(context=16_384) as server:
        return asyncio.run(measure(server.url))


def test_all_but_the_tail_comes_from_the_cache(found):
    assert found.messages == 13 + 2 * 2 and 5000 < found.prompt_tokens < 8000
    assert found.prompt_tokens - found.cached_tokens < 256


def test_times_are_those_of_the_turns(found):
    assert 0 < found.again.p50 <= found.again.max and found.cold > 0


def test_a_step_is_timed_in_which_all_rows_decode():
    cost = step_cost(context=1000, batch=3, steps=70)
    assert (cost.batch, cost.context) == (3, 1000) and 0 < cost.seconds.p50 < 0.05
