from dataclasses import replace

import pytest

from kakera.errors import UsageError
from kakera.evaluate.data import load_baseline, load_cases, shipped
from kakera.evaluate.scoring import score
from kakera.evaluate.session import open_engine, open_reader, open_seeing_reader
from kakera.evaluate.suites import run_suite, split_calls
from kakera.plan.plan import Wishes

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set",
            "parameters": {
                "type": "object",
                "properties": {"room": {"type": "string"}, "level": {"type": "integer"}, "on": {"type": "boolean"}},
            },
        },
    }
]


def call_text(**parameters):
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function=set>\n{inner}</function>\n</tool_call>"


def test_calls_are_typed_by_their_schema_and_text_stands_beside():
    beside, calls = split_calls("Right away.\n\n" + call_text(room="12", level="7", on="true"), TOOLS)
    assert beside.strip() == "Right away."
    assert calls == [{"name": "set", "arguments": {"room": "12", "level": 7, "on": True}}]


def test_two_calls_keep_their_order():
    _, calls = split_calls(call_text(level="1") + "\n" + call_text(level="2"), TOOLS)
    assert [call["arguments"]["level"] for call in calls] == [1, 2]


def test_an_answer_without_calls_is_all_text():
    assert split_calls("Which room?", TOOLS) == ("Which room?", [])


def test_a_call_cut_off_by_the_token_limit_is_still_a_call():
    _, calls = split_calls("<tool_call>\n<function=set>\n<parameter=room>\nkit", TOOLS)
    assert calls == [{"name": "set", "arguments": {"room": "kit"}}]


@pytest.mark.parametrize("suite", ["retrieval", "tools", "json"])
def test_the_rules_give_the_published_verdicts_on_the_baseline_answers(suite):
    baseline = load_baseline(shipped("baseline.jsonl"))
    for case in load_cases(suite):
        answer = baseline[case["id"]]["answer"].strip()
        beside, calls = split_calls(answer, case.get("tools") or ())
        assert score(case, answer, beside, calls) is baseline[case["id"]]["ok"], case["id"]


def test_a_suite_runs_through_the_engine_and_prompts_that_do_not_fit_say_so(tiny_model):
    reader = open_reader(tiny_model)
    engine = open_engine(tiny_model, Wishes(gpus="cpu", context=512, max_running=2, kv_group=64, host_cache=0))

    def case(name, text):
        messages = [{"role": "user", "content": text}]
        return {"id": name, "kind": "single", "messages": messages, "expected": ["x"], "score": "contains_all"}

    done = []
    cases = [case("a", "Hello"), case("long", "y" * 600), case("b", "Good day")]
    answers = run_suite("retrieval", cases, engine, reader, lambda: done.append(1))
    assert [answer.id for answer in answers] == ["a", "long", "b"]
    assert len(done) == 3
    assert answers[1].error.startswith("prompt and answer exceed the context of 512")
    assert answers[0].error == answers[2].error == ""
    again = run_suite("retrieval", cases[:1], engine, reader)
    assert again[0].answer == answers[0].answer  # greedy: neither company nor the prefix cache changes an answer


def test_a_suite_of_images_beside_its_file(seeing_model, tmp_path):
    """Images come from files, in groups whose pixels may wait; a model that sees none is told."""
    import io
    import json

    from PIL import Image

    (tmp_path / "images").mkdir()
    lines = []
    for i in range(4):
        stream = io.BytesIO()
        Image.new("RGB", (64, 64 + 8 * i), (60 * i, 0, 0)).save(stream, "PNG")
        (tmp_path / "images" / f"{i}.png").write_bytes(stream.getvalue())
        part = {"type": "image_url", "image_url": {"url": f"images/{i}.png"}}
        content = [part, {"type": "text", "text": "what?"}]
        case = {
            "id": f"c{i}",
            "kind": "look",
            "messages": [{"role": "user", "content": content}],
            "expected": ["never"],
        }
        lines.append(json.dumps({**case, "score": "contains_all"}))
    (tmp_path / "suite.jsonl").write_text("\n".join(lines))
    cases = load_cases("vision", tmp_path / "suite.jsonl")
    wishes = Wishes(gpus="cpu", context=512, max_running=2, kv_group=64, host_cache=0, image_tokens=100)
    reader, engine = open_seeing_reader(seeing_model, wishes), open_engine(seeing_model, wishes)
    limits = engine.scheduler.limits
    engine.scheduler.limits = replace(limits, pixel_bytes=2 * 64 * 88 * 3)
    answers = run_suite("vision", cases, engine, reader)
    assert [answer.error for answer in answers] == [""] * 4 and not any(answer.ok for answer in answers)
    assert [answer.prompt_tokens for answer in answers] == [answers[0].prompt_tokens + 8 * i for i in range(4)]
    assert engine.stats().counters["images_encoded"] == 4
    with pytest.raises(UsageError, match="reads no images"):
        open_seeing_reader(seeing_model, replace(wishes, vision="off"))
    with pytest.raises(UsageError, match="name one with --data FILE"):
        load_cases("vision")
    (tmp_path / "images" / "2.png").unlink()
    with pytest.raises(UsageError, match=r"can not read .*2\.png"):
        load_cases("vision", tmp_path / "suite.jsonl")
