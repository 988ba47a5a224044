"""What JSON costs is known before it is read, and what stands in its strings costs nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakera.text import json_size
from kakera.text.json_size import excess, read_json

values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(alphabet='a"\\[]{},:', max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(alphabet='a"\\[,', max_size=3), inner)
    ),
)


def nests(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, list | dict) + sum(map(nests, inner))


@given(values)
def test_lists_and_objects_are_counted_and_texts_are_not(value):
    body = json.dumps(value).encode() + b" " * 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "NESTS", nests(value))
        assert excess(body) is None
        patch.setattr(json_size, "NESTS", nests(value) - 1)
        assert nests(value) == 0 or "lists and objects" in excess(body)


@pytest.mark.parametrize("unit", ["[1]", "{}", '{"a":1}', "1", '""', "null", '"\\""', '{"a":{"b":[]}}'])
def test_too_many_of_anything_are_refused_in_words(unit):
    text = "[" + ",".join([unit] * 600_000) + "]"
    assert "is the limit" in excess(text.encode()) or "more than" in excess(text.encode())
    with pytest.raises(ValueError, match="lists and objects"):
        read_json(text)


def test_half_open_ones_are_counted_too():
    assert "lists and objects" in excess(b"[" * 200_000) and "lists and objects" in excess(b'[{"a":' * 200_000)


@pytest.mark.parametrize("text", ["[1],", '\\"', "\\\\", "a,b\n"])
def test_a_long_text_is_no_excess(text):
    assert read_json(json.dumps({"prompt": text * 300_000})) == {"prompt": text * 300_000}
