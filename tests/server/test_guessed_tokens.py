"""Tokens that come several at a time: what is shown, counted and reported does not depend on where events are cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kakera.contract.events import Finished, TokenLogprob, Tokens, Usage
from kakera.contract.request import Sampling
from kakera.run.scripted import BUNDLED
from kakera.server.choice import ChatOutput, ChoiceText, Job
from kakera.text.tokenizer import Tokenizer

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
TEXTS = {
    "calls": (f"Let us see.\n{CALL}{CALL}", {}),  # rtp-llm#694, vllm#40861: two calls that touch
    "thinking": ("so it is\n</think>\n\nYes, it is.", {"opens": True}),
    "thinking, then a call": (f"so\n</think>\n\n{CALL}", {"opens": True}),
    "a stop string": ("one two three four five six seven", {"stops": ("ree fo",)}),
    "a stop string in the end": ("one two three", {"stops": ("three",)}),
    "characters of several tokens": ("日本語のテキスト🙂です", {}),
}


@pytest.fixture(scope="module")
def mini_tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)


def told(tokenizer: Tokenizer, text: str, sizes, opens: bool = False, stops: tuple[str, ...] = ()):
    """All that comes of a text whose tokens come so many at a time."""
    chat = ChatOutput(opens_thinking=opens, tools=TOOLS)
    tokens = tokenizer.encode(text, allow_special=True)
    job = Job("r", (1,), Sampling(max_tokens=999, seed=1, logprobs=0), stops=stops, chat=chat)
    choice, deltas, at = ChoiceText(job, 0, tokenizer), [], 0
    while at < len(tokens) and not choice.stopped:
        piece = tuple(tokens[at : at + next(sizes)])
        deltas.append(choice.feed(Tokens("r", piece, tuple(TokenLogprob(t, -1.0) for t in piece))))
        at += len(piece)
    usage = Usage(1, 0, at, accepted_tokens=at)
    deltas.append(choice.finish(Finished("r", "abort" if choice.stopped else "stop", usage)))
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.calls:
            known = calls.setdefault(call.index, ["", ""])
            known[0] += call.name or ""
            known[1] += call.arguments or ""
    last = deltas[-1]
    shown = ["".join(delta.text for delta in deltas), "".join(delta.reasoning for delta in deltas)]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    return shown, calls, logprobs, replace(last, text="", reasoning="", calls=(), logprobs=())


@pytest.mark.parametrize("name", TEXTS)
def test_all_cuts_of_a_transcript_say_the_same(name, mini_tokenizer):
    """vllm#51812 and the like: one event with all of it, one a token, and any cuts between."""
    text, wishes = TEXTS[name]
    wanted = told(mini_tokenizer, text, iter(lambda: 1, 0), **wishes)
    assert wanted[-1].usage.completion_tokens == wanted[-1].usage.accepted_tokens > 0
    assert told(mini_tokenizer, text, iter(lambda: 10**6, 0), **wishes) == wanted
    rng = random.Random(1)
    for _ in range(30):
        assert told(mini_tokenizer, text, iter(lambda: rng.randrange(1, 12), 0), **wishes) == wanted


def test_reasoning_is_never_more_than_what_was_generated(mini_tokenizer):
    """sglang#39826, #37450: the end of the reasoning and the answer in one event; or nothing but reasoning."""
    text = "so it is\n</think>\n\nYes."
    count = len(mini_tokenizer.encode(text, allow_special=True))
    for sizes in (1, 7, 10**6):
        *_, last = told(mini_tokenizer, text, iter(lambda sizes=sizes: sizes, 0), opens=True)
        assert 0 < last.reasoning_tokens < count
        *_, endless = told(mini_tokenizer, "so it is " * 7, iter(lambda sizes=sizes: sizes, 0), opens=True)
        assert endless.reasoning_tokens == endless.usage.completion_tokens
