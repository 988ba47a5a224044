"""Every row is asked until an answer counts; what is so for all rows stops the run, and the next goes on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from kakera.batch import run as room
from kakera.batch.lines import read
from kakera.batch.output import Output
from kakera.batch.run import Batch
from kakera.batch.servers import Broken, Reply, Unreached
from kakera.errors import EngineDied, KakeraError

OK = Reply(
    200,
    {},
    b'{"id":"x","usage":{"prompt_tokens":10,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}',
)
MESSAGE = Reply(200, {}, b'{"usage":{"input_tokens":6,"cache_read_input_tokens":4,"output_tokens":2}}')


def refused(status: int, **headers: str) -> Reply:
    found = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Reply(status, found, b'{"error":{"message":"no"}}')


class Script:
    """Answers the row whose body names it with its outcomes, one after the other, and OK behind them."""

    def __init__(self, **outcomes):
        self.outcomes = {name: list(found) for name, found in outcomes.items()}
        self.asked: Counter[str] = Counter()
        self.together = self.most = 0

    async def post(self, url, body):
        name = json.loads(body)["name"]
        self.asked[name] += 1
        self.together += 1
        self.most = max(self.most, self.together)
        await asyncio.sleep(0)
        self.together -= 1
        outcome = self.outcomes[name].pop(0) if self.outcomes.get(name) else OK
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture(autouse=True)
def naps(monkeypatch):
    """How long was waited, without waiting."""
    taken, sleep = [], asyncio.sleep

    async def nap(seconds):
        if seconds:
            taken.append(seconds)
        await sleep(0)

    monkeypatch.setattr(room.asyncio, "sleep", nap)
    return taken


@pytest.fixture
def batch(tmp_path):
    """Runs rows of these names against a server; returns the tally, and who is in which file."""

    def run(names, server, parallel=2, **more):
        rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
        lines = [
            json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"name": name}})
            if name != "!"
            else "malformed"
            for name in names
        ]
        rows.write_text("\n".join(lines))
        try:
            with Output(out, rows) as output:
                tally = asyncio.run(Batch(server, output, parallel, **more).run(read(rows)))
        finally:
            found = [json.loads(line) for line in out.read_text().splitlines()]
            names = [line["custom_id"] for line in found]
            assert len(names) == len(set(names)), "an answer is written once"
        beside = tmp_path / "out.errors.jsonl"
        errors = [json.loads(line) for line in beside.read_text().splitlines()] if beside.exists() else []
        return tally, names, errors

    return run


def test_rows_are_answered_so_many_at_a_time_and_counted_in_every_dialect(batch):
    server = Script(b=[MESSAGE])
    tally, names, errors = batch("abcdefgh", server, parallel=3)
    assert sorted(names) == list("abcdefgh") and not errors and server.most == 3
    assert (tally.answered, tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (8, 80, 32, 16)


def test_one_at_a_time_keeps_the_files_order(batch):
    assert batch("hgfedcba", Script(), parallel=1)[1] == list("hgfedcba")


def test_malformed_and_refused_rows_are_errors_and_stop_nobody(batch):
    server = Script(b=[refused(400)], c=[refused(500)])
    tally, names, errors = batch("a!bcd", server)
    assert sorted(names) == ["a", "d"] and (tally.answered, tally.failed, tally.lines) == (2, 3, 5)
    told = {error["custom_id"]: error for error in errors}
    assert told["b"]["response"]["status_code"] == 400 and told["b"]["error"] is None
    assert told["c"]["response"]["status_code"] == 500 and told[None]["error"]["code"] == "invalid_json_line"


def test_the_next_run_asks_what_has_no_answer(batch):
    server = Script(b=[refused(400)])
    batch("a!bc", server)
    tally, names, errors = batch("a!bcd", server)
    assert sorted(names) == list("abcd") and len(errors) == 1
    assert server.asked == {"a": 1, "b": 2, "c": 1, "d": 1} and (tally.before, tally.answered) == (2, 2)


def test_a_full_queue_is_waited_for_as_long_as_it_says(batch, naps):
    server = Script(a=[refused(429, retry_after="7")] * 50)
    assert batch("ab", server)[1] == ["b", "a"] and naps == [7.0] * 50


@pytest.mark.parametrize("outcome", [refused(503), Broken("gone")], ids=["503", "broken"])
def test_a_row_by_which_the_server_goes_away_each_time_is_given_up(batch, naps, outcome):
    _, names, errors = batch("abc", Script(b=[outcome] * 99), parallel=1)
    assert names == ["a", "c"] and naps == [1, 2, 4, 8]
    assert errors[0]["error"]["code"] == "no_answer" and errors[0]["custom_id"] == "b"


def test_a_server_that_comes_back_goes_on(batch):
    server = Script(b=[Broken("killed"), *[Unreached("refused")] * 20])
    assert sorted(batch("abc", server)[1]) == ["a", "b", "c"] and server.asked["b"] == 22


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        ({"b": [Unreached("refused")] * 999}, "the same command goes on"),
        ({"b": [refused(401)]}, "--api-key"),
        ({"b": [EngineDied("the engine is gone")]}, "is gone"),
    ],
)
def test_what_is_so_for_every_row_stops_the_run_and_the_next_goes_on(batch, outcomes, says):
    server = Script(**outcomes)
    with pytest.raises(KakeraError, match=says):
        batch("abc", server, parallel=1, patience_seconds=0.0)
    assert batch("abc", Script())[0].before == 1


def test_a_server_that_never_answered_is_said_at_once(batch, naps):
    with pytest.raises(KakeraError, match="is the server running"):
        batch("a", Script(a=[Unreached("refused")]))
    assert not naps
