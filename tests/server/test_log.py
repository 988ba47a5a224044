"""What an operator reads: a line a request with time, level, client and speeds, and signs of life of long prompts."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest

from kakera.contract.events import Finished, Progress, Usage
from kakera.contract.request import Sampling
from kakera.server.choice import Job
from kakera.server.generate import Generation
from kakera.server.metrics.prometheus import Metrics
from kakera.server.metrics.record import RequestRecord, record_refusal
from kakera.server.run import configure_logging


def lines_of(caplog, record: RequestRecord, monkeypatch, steps: list[tuple[float, int]]) -> list[str]:
    """What is logged while a prompt of 9,000 tokens is read in these (seconds, tokens) steps."""
    caplog.set_level("INFO", "kakera.progress")
    for seconds, done in steps:
        monkeypatch.setattr("kakera.server.metrics.record.time.monotonic", lambda at=seconds: at)
        record.progress(done, 9000)
    return [r.getMessage() for r in caplog.records if r.name == "kakera.progress"]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(i / 2, 100 * i) for i in range(1, 20)], []),  # read within ten seconds
        ([(i / 2, 100 * i) for i in range(1, 91)], [2000, 4000, 6000, 8000]),
        ([(15.0, 4096), (16.0, 4500), (30.0, 8192), (40.0, 9000)], [4096, 8192]),  # steps longer than that
    ],
)
def test_a_long_prompt_is_told_of_every_ten_seconds(caplog, monkeypatch, steps, told):
    record = RequestRecord("chatcmpl-1", "/v1/chat/completions", 9000, Metrics(), 0.0, "10.0.0.7", queued=0.0)
    lines = lines_of(caplog, record, monkeypatch, steps)
    assert [line.split(" prompt")[0] for line in lines] == [
        f"chatcmpl-1 of 10.0.0.7: {done:,} of 9,000" for done in told
    ]
    if told[2:]:
        assert lines[0].endswith("200 tokens/s, about 35 s left")


class Reader:
    """An engine that reads a prompt in three steps, twice for two choices."""

    async def stream(self, request):
        for done in (64, 128, 192):
            yield Progress(request.id, done, 192)
        yield Finished(request.id, "length", Usage(192, 0, 1))


def test_progress_of_the_engine_comes_to_the_log_once_for_all_choices(model, caplog, monkeypatch):
    caplog.set_level("INFO", "kakera.progress")
    monkeypatch.setattr("kakera.server.metrics.record.PROGRESS_SECONDS", 0.0)

    async def read() -> None:
        job = Job("one", (1,) * 192, Sampling(max_tokens=1, seed=1), choices=2)
        record = RequestRecord("one", "/v1/completions", 192, Metrics(), 0.0, "10.0.0.7")
        async for _ in Generation(Reader(), model.tokenizer, job, record).deltas():  # type: ignore[arg-type]
            pass

    asyncio.run(read())
    told = [r.getMessage() for r in caplog.records if r.name == "kakera.progress"]
    assert [line.split(",")[0].removesuffix(" prompt tokens read") for line in told] == [
        "one of 10.0.0.7: 64 of 192",
        "one of 10.0.0.7: 128 of 192",
    ]


def test_prompt_speed_counts_what_was_read_alone(caplog):
    caplog.set_level("INFO", "kakera.requests")
    record = RequestRecord("a", "/v1/completions", 9000, Metrics(), 0.0)
    record.finished([Usage(9000, 8000, 5, prefill_seconds=4.0)])
    assert json.loads(caplog.records[-1].getMessage())["prompt_tokens_per_s"] == 250.0


def test_every_line_has_its_time_and_level_and_uvicorn_is_quiet(capfd):
    names = ("kakera", "uvicorn")
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in map(logging.getLogger, names)]
    try:
        configure_logging("info")
        record_refusal(Metrics(), "other", 404, "http_404", None, "/a\nb" + "x" * 1000, "10.0.0.7")
        logging.getLogger("uvicorn.error").info("Started server process")
        logging.getLogger("uvicorn.error").error("bad")
        lines = capfd.readouterr().err.splitlines()
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    assert len(lines) == 2 and all(re.match(r"\d{4}-\d\d-\d\d \S+ (INFO|ERROR) ", line) for line in lines), lines
    assert '"route": "/a\\nbxxx' in lines[0] and len(lines[0]) < 400 and '"client": "10.0.0.7"' in lines[0]
