"""The model's own `</think>` never shows as content; one that an answer speaks about does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.chat.stray import StrayCloses


def cleaned(pieces, expected=False) -> str:
    strays = StrayCloses(expected)
    return "".join(strays.feed(piece) for piece in pieces) + strays.flush()


CASES = [  # text, expected, what is shown
    ("w7\n</think>\n\nAnswer.", True, "w7\n\n\nAnswer."),
    ("w7</think>Answer.", True, "w7Answer."),
    ("w7 </think> Answer.", True, "w7  Answer."),
    ("</think>\n\nAnswer.", True, "Answer."),
    ("\n </think>\n\nAnswer.", False, "Answer."),
    ("</think></think>\n</think>\n\nAnswer.", False, "Answer."),
    ("a\n</think>\nb</think>\nc </think>", False, "a\n\nb\nc "),
    ("Use the </think> tag.", False, "Use the </think> tag."),
    ("w7\n</think>\n\nUse the </think> tag and <think> tag.", True, "w7\n\n\nUse the </think> tag and <think> tag."),
    ("It is `</think>`.", True, "It is `</think>`."),
    ("```\n<think>\nplan\n</think>\nanswer\n```", False, "```\n<think>\nplan\n</think>\nanswer\n```"),
    ("  plain < text </thin", True, "  plain < text </thin"),
    ("  ", True, "  "),
    ("", True, ""),
]


@pytest.mark.parametrize(("text", "expected", "shown"), CASES)
def test_whole_and_cut_anywhere_agree(text, expected, shown):
    assert cleaned([text], expected) == shown
    assert cleaned(list(text), expected) == shown
    for cut in range(len(text)):
        assert cleaned([text[:cut], text[cut:]], expected) == shown


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "`", "<", "/"]), max_size=10),
    st.booleans(),
    st.data(),
)
def test_chunking_never_matters(atoms, expected, data):
    text = "".join(atoms)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert cleaned(pieces, expected) == cleaned(list(text), expected)


def test_a_call_ends_what_stands_before_it():
    strays = StrayCloses(expected=True)
    assert strays.feed("Look.\n</thin") + strays.flush() == "Look.\n</thin"
    assert strays.feed("\n</think>") + strays.feed("\n\nok") + strays.flush() == "ok"
