"""Scenarios against a real server process with the tiny model."""

import asyncio
import json
import subprocess
import sys

import psutil
import pytest

from kakera.bench.client import Client
from kakera.bench.load import calibrate, level, prefill_beside, second_turn
from kakera.bench.server import ServerProcess, flags, serving
from kakera.bench.text import Prose
from kakera.errors import EngineDied, KakeraError
from kakera.plan.plan import Wishes

SMALL = Wishes(gpus="cpu", context=4096, max_running=3, kv_group=64, host_cache=200_000_000)


@pytest.fixture(scope="module")
def server(tiny_model):
    with ServerProcess(str(tiny_model), flags(SMALL)) as running:
        yield running


def measure(server, scenario):
    async def run():
        prose = Prose()
        async with Client(server.url) as client:
            await calibrate(client, prose)
            return await scenario(client, prose)

    return asyncio.run(run())


def test_options_are_spelled_as_the_command_line_takes_them():
    assert flags(Wishes()) == []
    assert serving(Wishes()) == ["--drafts", "off"]  # what a server does by itself is no default here
    assert flags(Wishes(max_running=3, kv="bf16", host_cache=5)) == [
        "--max-running",
        "3",
        "--kv",
        "bf16",
        "--host-cache",
        "5",
    ]


def test_a_level_reads_every_stream_to_its_end(server):
    found = measure(server, lambda client, prose: level(client, prose, 2, 64, 24))
    assert (found.streams, found.new_tokens) == (2, 24)
    assert found.tokens_per_second > 0 and found.ttft.max > 0
    assert 48 <= found.prompt_tokens <= 80


def test_a_second_turn_is_served_from_the_cache(server):
    found = measure(server, lambda client, prose: second_turn(client, prose, 1500))
    assert found.cold_tokens > 1400
    assert found.cached_share > 0.9
    assert found.warm_seconds < found.cold_seconds


def test_a_long_prompt_beside_running_streams(server, monkeypatch):
    monkeypatch.setattr("kakera.bench.load.ALONE_SECONDS", 0.5)
    found = measure(server, lambda client, prose: prefill_beside(client, prose, 2, 1000))
    assert found.alone.p95 > 0 and found.beside.p95 > 0
    assert 0 < found.kept < 3


def test_a_server_that_can_not_start_says_why():
    with pytest.raises(EngineDied, match="no such directory"), ServerProcess("no-such-model"):
        pass


def test_who_kills_the_one_that_started_it_ends_the_server_too(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"streams": [{"text": "yes"}]}))
    code = (
        "import time\nfrom kakera.bench.server import ServerProcess\n"
        f"with ServerProcess('scripted:{script}') as server:\n    print(server.pid, flush=True)\n    time.sleep(600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = psutil.Process(int(starter.stdout.readline()))
    starter.kill()
    starter.wait()
    server.wait(60)


def test_an_address_without_a_server_is_named():
    async def connect():
        async with Client("http://127.0.0.1:9"):
            pass

    with pytest.raises(KakeraError, match=r"127\.0\.0\.1:9.*is it running"):
        asyncio.run(connect())
