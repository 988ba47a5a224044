"""An answer's blocks: opened once, grown, closed once, one after another, and nothing of the text is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.chat.tools import CallDelta
from kakera.server.agents.blocks import Answer
from kakera.server.choice import Delta

PIECE = st.sampled_from(["", "a", "bc"])


@st.composite
def answers(draw) -> list[Delta]:
    """Deltas as ChoiceText makes them: pieces of a call only while it is the last one announced."""
    deltas, calls = [], 0
    for _ in range(draw(st.integers(0, 8))):
        pieces = []
        for new in draw(st.lists(st.booleans(), max_size=3)):
            if new:
                pieces.append(CallDelta(calls, draw(PIECE), f"call_{calls}", "f"))
                calls += 1
            elif calls and (pieces or (deltas and deltas[-1].calls and not deltas[-1].text)):
                pieces.append(CallDelta(calls - 1, draw(PIECE)))
        deltas.append(Delta(0, draw(PIECE), draw(PIECE) if not calls else "", tuple(pieces)))
    return [*deltas, Delta(0, finish="stop")]


@settings(max_examples=150)
@given(answers())
def test_blocks_follow_one_another_and_keep_every_character(deltas):
    answer = Answer()
    steps = [step for delta in deltas for step in answer.feed(delta)]
    current = None
    for step in steps:
        if step.what == "open":
            assert current is None
            current = step.block
        assert step.block is current
        if step.what == "close":
            current = None
    assert current is None and [block.index for block in answer.blocks] == list(range(len(answer.blocks)))
    for block in answer.blocks:
        assert block.text == "".join(step.text for step in steps if step.block is block)
    for kind, texts in (
        ("text", [delta.text for delta in deltas]),
        ("reasoning", [delta.reasoning for delta in deltas]),
        ("call", [call.arguments for delta in deltas for call in delta.calls]),
    ):
        assert "".join(block.text for block in answer.blocks if block.kind == kind) == "".join(texts)
    assert len([b for b in answer.blocks if b.kind == "call"]) == sum(c.id is not None for d in deltas for c in d.calls)
    assert answer.last is deltas[-1]


def test_the_end_of_a_call_comes_before_the_text_behind_it():
    answer = Answer()
    answer.feed(Delta(0, calls=(CallDelta(0, "", "call_0", "f"),)))
    answer.feed(Delta(0, "Done.", calls=(CallDelta(0, "{}"), CallDelta(1, "{}", "call_1", "g"))))
    assert [(block.kind, block.text) for block in answer.blocks] == [("call", "{}"), ("text", "Done."), ("call", "{}")]
