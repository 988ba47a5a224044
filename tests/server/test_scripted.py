"""The scripted runner: pieces are tokens exactly as written, streams are chosen by match and in turn."""

import json

import pytest

from kakera.contract.request import Sampling
from kakera.contract.step import SamplingInput, Segment, StepPlan
from kakera.errors import CheckpointError
from kakera.run.scripted import Script, ScriptedRunner


def load(tmp_path, *streams, **more) -> Script:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"streams": list(streams), **more}))
    return Script.load(path)


def play(runner: ScriptedRunner, script: Script, prompt: str, count: int, name: str = "r") -> list[int]:
    tokens = script.tokenizer.encode(prompt, allow_special=True)
    output: list[int] = []
    for step in range(count):
        context = (*tokens, *output)
        row = Segment(name, 0, context[-1:], len(context) - 1, sampled=1)
        given = {name: SamplingInput(name, Sampling(100, 0), context, len(tokens))}
        output += runner.execute(StepPlan(step, decode=(row,)), given).rows[0].tokens
    return output


def test_pieces_are_tokens_and_the_end_token_follows(tmp_path):
    pieces = ["H", "i", " there", {"bytes": "f09f"}, {"bytes": "98"}, "<tool_call>", 17]
    script = load(tmp_path, {"pieces": pieces})
    tokens = script.streams[0].tokens
    assert [script.tokenizer.token_bytes(t) for t in tokens[:6]] == [b"H", b"i", b" there", b"\xf0", b"\x9f", b"\x98"]
    assert tokens[6] == script.tokenizer.added["<tool_call>"].id and tokens[7] == 17
    end = script.tokenizer.eos
    assert play(ScriptedRunner(script), script, "x", len(tokens) + 2) == [*tokens, end, end]


def test_a_match_decides_and_the_others_take_turns(tmp_path):
    script = load(tmp_path, {"match": "cat", "text": "meow"}, {"text": "one"}, {"text": "two"})
    runner = ScriptedRunner(script)
    first = [play(runner, script, prompt, 1, f"r{i}")[0] for i, prompt in enumerate(["a", "the cat", "b", "c"])]
    starts = [stream.tokens[0] for stream in script.streams]
    assert first == [starts[1], starts[0], starts[2], starts[1]]


def test_a_delay_is_kept(tmp_path):
    script = load(tmp_path, {"text": "abc", "delay_ms": 20})
    plan = StepPlan(0, prefill=(Segment("r", 0, (5,), 0, sampled=1),))
    assert ScriptedRunner(script).execute(plan, {"r": SamplingInput("r", Sampling(5, 0), (5,), 1)}).seconds >= 0.02


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "can not be read"),
        ("[]", "streams"),
        ('{"streams": []}', "at least one"),
        ('{"streams": [{}]}', r"streams\[0\]"),
        ('{"streams": [{"text": "a", "pieces": []}]}', "either"),
        ('{"streams": [{"pieces": [99999999]}]}', "a piece is"),
        ('{"streams": [{"pieces": [{"bytes": "xy"}]}]}', "hexadecimal"),
        ('{"streams": [{"text": "a"}], "tokenizer": "nowhere"}', "tokenizer.json is missing"),
    ],
)
def test_a_wrong_script_is_explained(tmp_path, document, message):
    path = tmp_path / "script.json"
    path.write_text(document)
    with pytest.raises(CheckpointError, match=message):
        Script.load(path)


def test_drafts_that_are_the_scripts_own_are_kept(tmp_path):
    runner = ScriptedRunner(load(tmp_path, {"pieces": [5, 6, 7, 8]}))
    for drafts, tokens in {(6, 7): (5,), (5, 9): (5, 6), (5, 6): (5, 6, 7), (): (5,)}.items():
        row = Segment("r", 0, (1, *drafts), 0, sampled=1 + len(drafts))
        given = SamplingInput("r", Sampling(9, 0, logprobs=0), (1,), 1)
        (result,) = runner.execute(StepPlan(0, decode=(row,)), {"r": given}).rows
        assert result.tokens == tokens == tuple(each.token for each in result.logprobs)
