"""`kakera serve --gpus cpu,cpu`: a model that two processes share, as a client sees it and as one of them dies."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from tests.command_server import CommandServer
from typer.testing import CliRunner

from kakera.arch.registry import load_spec
from kakera.cli import app
from kakera.cli.engine import with_disk
from kakera.errors import RequestRefused, UsageError
from kakera.plan.plan import Wishes
from kakera.plan.planner import plan_for
from kakera.run.process.recipe import EngineRecipe
from kakera.run.ranks.engine import Sleepless, open_engine
from kakera.run.scripted import BUNDLED
from kakera.text.tokenizer import Tokenizer
from random_model import write_config
from tiny_model import TEMPLATE, byte_tokenizer

END = 258
SHARED = {  # a KV head a rank; bfloat16 throughout
    "quantization_config": None,
    "vocab_size": 640,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "eos_token_id": END,
}


@pytest.fixture
def shared_model(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    from kakera.weights.synthetic import tensors_of

    directory = write_config(tmp_path / "shared", **SHARED, random_weights=7)
    save_file({t.name: t.read() for t in tensors_of(directory, load_spec(directory))}, directory / "model.safetensors")
    write_config(directory, **SHARED)
    (directory / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def test_what_does_not_go_with_several_processes_is_refused_before_anything_is_loaded():
    plan = plan_for(BUNDLED, Wishes(gpus="cpu,cpu", context=512))
    recipe = EngineRecipe(BUNDLED, plan)
    with pytest.raises(UsageError, match="--disk-cache: not for a model that several"):
        with_disk(recipe, 10**9, print)
    asleep = CliRunner().invoke(app, ["serve", "mini", "--gpus", "cpu,cpu", "--sleep-after", "5"])
    assert isinstance(asleep.exception, UsageError) and "--sleep-after: not for a model" in str(asleep.exception)
    with pytest.raises(RequestRefused, match="can not sleep yet"):  # instead of a sleep that gives nothing back
        Sleepless().sleep(1)
    with pytest.raises(UsageError, match="3 processes can not share 2 KV heads"):
        plan_for(BUNDLED, Wishes(gpus="cpu,cpu,cpu"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_two_processes_serve_what_one_says_and_a_stopped_one_is_told_to_every_client(shared_model):
    options = {"context": 1024, "max_running": 2, "chunk": 128, "host_cache": 10**8}
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    prompt = "A text of more than a page, so that another request with it finds its beginning. " * 2
    with CommandServer(str(shared_model), "--gpus", "cpu,cpu", *given) as server:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        cold, warm = (server.complete(**body).json() for _ in range(2))
        assert warm["choices"] == cold["choices"] and warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        alone = _alone(shared_model, options, prompt)
        assert cold["choices"][0]["text"] == alone
        refused = server.http.post("/sleep?level=1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "can_not_sleep")
        assert server.complete(**body).json()["choices"] == cold["choices"], "it is awake"
        family = psutil.Process(server.process.pid).children(recursive=True)
        (follower,) = [process for process in family if "kakera.run.ranks.follower" in process.cmdline()]
        with server.http.stream("POST", "/v1/completions", json={**body, "max_tokens": 800, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(follower.pid, signal.SIGSTOP)
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_died"
        assert server.process.wait(timeout=60) == 70
        assert not psutil.wait_procs(family, timeout=60)[1]
        assert f"rank 1 (process {follower.pid}) did nothing for 2 seconds" in server.process.stderr.read()


def _alone(directory: Path, options: dict[str, int], prompt: str) -> str:
    from kakera.contract.request import Request, Sampling
    from kakera.run.generate import generate

    tokenizer = Tokenizer.load(directory)
    engine = open_engine(directory, plan_for(directory, Wishes(gpus="cpu", **options)))
    sampling = Sampling(max_tokens=24, seed=0, temperature=0.0)
    (completion,) = generate(engine, [Request("alone", tuple(tokenizer.encode(prompt)), sampling)]).values()
    return tokenizer.decode(completion.tokens)
