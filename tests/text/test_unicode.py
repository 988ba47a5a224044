"""Half a surrogate pair is replaced, whatever stands around it; everything else is left alone."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.text.unicode import well_formed


@settings(max_examples=60)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=12))
def test_what_utf8_can_carry_is_the_same_object(text):
    assert well_formed(text) is text


@settings(max_examples=60)
@given(st.text(alphabet="a\u00e9\U0001f600\ud83d\ude00\udfff", max_size=12))
def test_whatever_comes_out_can_be_sent_and_keeps_its_length(text):
    clean = well_formed(text)
    paired = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert json.loads(json.dumps(clean).encode()) == clean.encode().decode()
    assert len(clean) == len(paired)
    assert all(
        new == old or (new == "\ufffd" and "\ud800" <= old <= "\udfff") for new, old in zip(clean, paired, strict=True)
    )
