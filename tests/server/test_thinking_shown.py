"""Between reasoning and content: the model's own `</think>` never shows, and stop strings act on content."""

import pytest
from live_server import start
from test_histories import CALL, FUNCTION

WORDS = "w0 w1 w2 w3 w4 w5 w6 w7"
CLOSES = {
    "LINE-1": f"{WORDS}\n</think>\n\nAnswer.",
    "TIGHT-1": f"{WORDS}</think>Answer.",
    "TWICE-1": f"{WORDS}\n</think>\n</think>\n\nAnswer.",
    "FIRST-1": "</think>\n\nAnswer.",
    "OPEN-1": f"<think>\n{WORDS}\n</think>\n\nAnswer.",
    "CALL-1": f"{WORDS}\n{CALL}\n</think>\n\nAnswer.",
}
SPOKEN = f"{WORDS}\n</think>\n\nUse the </think> tag, or `</think>`."
FILE = CALL.replace('Oslo, "N"', "a\n</think>\nb")
STOPPED = "Alpha STOP beta.\n</think>\n\nGamma STOP delta."
FORM = '{"tag": "a </think> b"}'
OTHERS = {"SPOKEN-1": SPOKEN, "FILE-1": FILE, "STOPPED-1": STOPPED}
CUT = CLOSES["LINE-1"]
TEXTS = [{"match": f"CUT-{at}-", "pieces": [CUT[:at], CUT[at:]]} for at in range(1, len(CUT))]
TEXTS += [{"match": "FORM-1", "pieces": list(FORM)}]
TEXTS += [{"match": name, "text": text} for name, text in (CLOSES | OTHERS).items()]
TEXTS += [{"match": name.replace("-1", "-2"), "pieces": list(text)} for name, text in CLOSES.items()]


@pytest.fixture(scope="module")
def live(model, tmp_path_factory):
    with start(model, tmp_path_factory.mktemp("thinking") / "script.json", TEXTS) as server:
        yield server


def chat(live, text, **more) -> tuple[str, str, str]:
    """(reasoning, content, finish reason), the same whole and streamed."""
    body = {"messages": [{"role": "user", "content": text}], **more}
    choice = live.post("/v1/chat/completions", **body).json()["choices"][0]
    message = choice["message"]
    whole = (message.get("reasoning_content", ""), message["content"] or "", choice["finish_reason"])
    choices = [c["choices"][0] for c in live.events(live.post("/v1/chat/completions", **body, stream=True))]
    pieces = ["".join(c["delta"].get(name, "") for c in choices) for name in ("reasoning_content", "content")]
    assert (*pieces, choices[-1]["finish_reason"]) == whole
    return whole


@pytest.mark.parametrize("budget", range(1, 16))
def test_a_budget_that_ends_the_reasoning_leaves_no_tag_of_the_models_own(live, budget):
    for name in CLOSES:
        for text in (name, name.replace("-1", "-2")):
            tools = [{"type": "function", "function": FUNCTION}] if "CALL" in name else None
            reasoning, content, _ = chat(live, text, thinking_budget=budget, **({"tools": tools} if tools else {}))
            assert "think>" not in reasoning + content, (text, reasoning, content)
            if text == name:  # letter by letter it is no token that the engine knows as the end
                assert content.endswith("wer."), text  # a forced token may take the place of the script's


@pytest.mark.parametrize("at", range(1, len(CUT)))
def test_wherever_the_stream_is_cut(live, at):
    for more in ({"thinking_budget": 2}, {"enable_thinking": False}, {}):
        _, content, _ = chat(live, f"CUT-{at}-", **more)
        assert "think>" not in content and content.endswith("wer.")


@pytest.mark.parametrize("text", [*CLOSES, *(name.replace("-1", "-2") for name in CLOSES)])
def test_thinking_off_shows_none_either(live, text):
    tools = {"tools": [{"type": "function", "function": FUNCTION}]} if "CALL" in text else {}
    assert "think>" not in chat(live, text, enable_thinking=False, **tools)[1]
    message = {"role": "user", "content": text}
    anthropic = live.post("/v1/messages", max_tokens=300, messages=[message]).json()
    responses = live.post("/v1/responses", input=text, reasoning={"effort": "none"}).json()
    assert anthropic["content"][-1]["text"].endswith("Answer.") and responses["output"][-1]["content"]
    for answer in (anthropic, responses):
        assert "think>" not in str(answer)


def test_messages_with_a_budget(live):
    thinking = {"type": "enabled", "budget_tokens": 3}
    body = {"max_tokens": 99, "thinking": thinking, "messages": [{"role": "user", "content": "LINE-1"}]}
    thought, text = live.post("/v1/messages", **body).json()["content"]
    assert thought["thinking"] and text["text"].endswith("Answer.") and "think>" not in text["text"]
    streamed = live.post("/v1/messages", **body, stream=True).text
    assert "Answer" in streamed and "</think>" not in streamed


def test_a_tag_that_the_answer_speaks_of_stays(live):
    for more in ({}, {"enable_thinking": False}):
        assert chat(live, "SPOKEN-1", **more)[1].endswith("Use the </think> tag, or `</think>`.")


@pytest.mark.parametrize("more", [{"enable_thinking": False}, {"thinking_budget": 1}], ids=str)
def test_arguments_of_a_call_keep_it(live, more):
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [{"role": "user", "content": "FILE-1"}], "tools": tools, **more}
    message = live.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    if more.get("thinking_budget") is None:  # where forced tokens do not take the place of the call's
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "a\\n</think>\\nb"}'


def test_an_answer_in_a_form_keeps_it(live):
    form = {"type": "json_object"}
    assert chat(live, "FORM-1", response_format=form, enable_thinking=False)[1] == FORM


def test_a_stop_string_acts_on_content(live):
    assert chat(live, "STOPPED-1", stop="STOP") == ("Alpha STOP beta.", "Gamma ", "stop")
    assert chat(live, "STOPPED-1", stop=["beta"]) == ("Alpha STOP beta.", "Gamma STOP delta.", "stop")
    assert chat(live, "STOPPED-1", stop="STOP", enable_thinking=False)[1] == "Alpha "


def test_and_on_the_reasoning_where_that_is_asked_for(live):
    assert chat(live, "STOPPED-1", stop="STOP", stop_in_thinking=True) == ("Alpha", "", "stop")
    assert chat(live, "STOPPED-1", stop="</think>", stop_in_thinking=True) == ("Alpha STOP beta.", "", "stop")


def test_messages_and_responses_stop_alike(live):
    message = {"role": "user", "content": "STOPPED-1"}
    body = {"max_tokens": 99, "thinking": {"type": "adaptive"}, "messages": [message], "stop_sequences": ["STOP"]}
    answer = live.post("/v1/messages", **body).json()
    assert [b.get("text", b.get("thinking")) for b in answer["content"]] == ["Alpha STOP beta.", "Gamma "]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
    answer = live.post("/v1/messages", **body, stop_in_thinking=True).json()
    assert [b["type"] for b in answer["content"]] == ["thinking"] and answer["stop_reason"] == "stop_sequence"
    for stop in ("STOP", ["STOP", "x"]):
        answer = live.post("/v1/responses", input="STOPPED-1", stop=stop).json()
        assert [item["content"][0]["text"] for item in answer["output"]] == ["Alpha STOP beta.", "Gamma "]
        assert answer["status"] == "completed"
        streamed = live.post("/v1/responses", input="STOPPED-1", stop=stop, stream=True).text
        assert "Gamma" in streamed and "delta." not in streamed
    answer = live.post("/v1/responses", input="STOPPED-1", stop="STOP", stop_in_thinking=True).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning"]
    for wrong in ("", [""], 5, ["x"] * 17):
        refused = live.post("/v1/responses", input="hi", stop=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("stop")


@pytest.mark.parametrize("more", [{}, {"stop_in_thinking": True}, {"enable_thinking": False}], ids=str)
def test_log_probabilities_end_where_the_text_does(live, more):
    body = {"messages": [{"role": "user", "content": "STOPPED-1"}], "logprobs": True, "stop": "STOP", **more}
    choice = live.post("/v1/chat/completions", **body).json()["choices"][0]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    shown = STOPPED[: STOPPED.rindex("STOP")] if not more else STOPPED[: STOPPED.index("STOP")]
    assert "".join(tokens).startswith(shown) and len("".join(tokens[:-1])) < len(shown), "none begins behind it"
