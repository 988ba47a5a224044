"""`--spec` on the command line, and a server whose model has random weights."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kakera.bench.server import ServerProcess, flags
from kakera.cli import app
from kakera.cli.bench_common import numbers
from kakera.errors import UsageError
from kakera.plan.plan import Wishes
from lazily import lazily
from random_model import write_config

openai = lazily("openai")

SMALL = Wishes(gpus="cpu", context=1024, max_running=2, host_cache=50_000_000)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("shape") / "tiny")


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


def test_decode_computes_a_text_once_and_shows_memory_beside_the_plan(shape):
    options = ("--contexts", "128,512", "--batches", "1,2", "--steps", "4", *flags(SMALL), "--json")
    found = json.loads(run("decode", "--spec", str(shape), *options).stdout)
    computed = {(row["context"], row["batch"]): row["computed_tokens"] for row in found["rows"]}
    # the last page of a prompt is computed on a hit, too; at 512 the second row's text is new
    assert computed == {(512, 1): 512, (512, 2): 512 + 64, (128, 1): 64, (128, 2): 128}
    assert found["model"] == f"spec:{shape}"
    memory = {row["name"]: row for row in found["memory"]["rows"]}
    assert memory["recurrent states"]["measured"] == memory["recurrent states"]["planned"]
    assert found["memory"]["measured"] > 0


def test_prefill_takes_a_spec(shape):
    found = json.loads(run("prefill", "--spec", str(shape), "--contexts", "200", *flags(SMALL), "--json").stdout)
    assert [row["context"] for row in found["rows"]] == [200]


def test_serve_takes_a_spec_and_adds_up_its_memory(shape):
    load = ("--streams", "1", "--prompt-tokens", "32", "--new-tokens", "4", "--long", "0")
    found = json.loads(run("serve", "--spec", str(shape), *load, *flags(SMALL), "--json").stdout)
    assert found["levels"][0]["new_tokens"] == 4
    assert found["memory"]["planned"] > 0 and found["memory"]["measured"] > 10**8


def test_an_openai_client_talks_to_random_weights(shape):
    with ServerProcess(f"spec:{shape}", flags(SMALL)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
        messages = [{"role": "user", "content": "Is anybody there?"}]
        seen = [
            client.chat.completions.create(
                model=f"spec:{shape}", messages=messages, max_tokens=12, temperature=0, seed=1
            )
            for _ in range(2)
        ]
    answers = [answer.choices[0].message.content or answer.choices[0].message.reasoning_content for answer in seen]
    assert answers[0] and answers[0] == answers[1]
    assert 8 <= seen[0].usage.prompt_tokens <= 30


def test_a_model_and_a_spec_are_one_too_many(shape):
    with pytest.raises(UsageError, match="measure one of them"):
        run("decode", "some/model", "--spec", str(shape))


def test_numbers_may_be_given_in_units_of_1024():
    assert numbers("--contexts", "128k, 8K,1000") == [1000, 8192, 131072]
    for wrong in ("k", "1.5k", "0k", "2m"):
        with pytest.raises(UsageError):
            numbers("--contexts", wrong)
