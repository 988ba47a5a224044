"""A step plan is a message: it comes out of its bytes as it went in."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kakera.contract.events import TokenLogprob
from kakera.contract.step import (
    Action,
    DiskRecord,
    ImageRows,
    RowResult,
    SamplingInput,
    SavePoint,
    Segment,
    StepPlan,
    StepResult,
    decode_plan,
    encode_plan,
)

number = st.integers(0, 2**31 - 1)
numbers = st.lists(number, max_size=5).map(tuple)
pairs = st.lists(st.tuples(number, number), max_size=4).map(tuple)
digest = st.binary(min_size=16, max_size=16)
kinds = st.sampled_from(["page", "checkpoint", "sink"])
record = st.builds(DiskRecord, kinds, number, digest, digest, st.binary(max_size=256), number, st.booleans())
records = st.lists(record, max_size=3).map(tuple)
KINDS = {
    "job": number,
    "records": records,
    "slot": number,
    "checkpoint": number,
    "position": number,
    "sink": number,
    "pairs": pairs,
    "digest": st.binary(max_size=32),
    "digests": st.lists(st.binary(max_size=32), max_size=3).map(tuple),
    "pixels": st.binary(max_size=99),
    "rows": number,
    "columns": number,
}


def action(kind: type) -> st.SearchStrategy:
    fields = {field.name: KINDS.get(field.name, numbers) for field in msgspec.structs.fields(kind)}
    if kind.__name__ == "RestoreCheckpoint":
        fields["sink"] = st.none() | number
    return st.builds(kind, **fields)


actions = st.lists(st.one_of([action(kind) for kind in Action.__args__]), max_size=6).map(tuple)
segment = st.builds(
    Segment,
    request_id=st.text(max_size=40),
    slot=number,
    tokens=numbers,
    start=number,
    known_pages=number,
    new_pages=numbers,
    sampled=st.integers(0, 8),
    scored=number,
    saves=st.lists(st.builds(SavePoint, number, number), max_size=3).map(tuple),
    positions=st.lists(numbers, max_size=3).map(tuple),
    images=st.lists(st.builds(ImageRows, st.binary(max_size=32), number, number, number), max_size=2).map(tuple),
)
segments = st.lists(segment, max_size=3).map(tuple)
plans = st.builds(StepPlan, number, before=actions, decode=segments, prefill=segments, after=actions)


@settings(max_examples=40)
@given(plans)
def test_a_plan_comes_out_of_its_bytes_as_it_went_in(plan):
    received = decode_plan(encode_plan(plan))
    assert received == plan and hash(received) == hash(plan)
    assert [type(each) for each in received.before] == [type(each) for each in plan.before]


def test_a_result_comes_out_of_its_bytes_too():
    logprob = TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.5)))
    result = StepResult(7, (RowResult("r", (3, 4), (logprob,), complete=True), RowResult("s", error="no")), 0.25)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result


def test_what_is_chosen_behind_drafts_is_chosen_by_the_text_with_them():
    given = SamplingInput("r", None, (1, 2, 3), 2)  # type: ignore[arg-type]
    longer = given.behind((7, 8))
    assert [*longer.output] == [3, 7, 8] and longer.generated == 3 and given.generated == 1
    assert given.behind(()) is given
