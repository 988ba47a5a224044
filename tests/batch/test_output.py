"""What a batch writes survives a kill at any byte, and no other file is harmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakera.batch.lines import Fault, Row, among, answer_line, error_line
from kakera.batch.output import Output, errors_beside
from kakera.errors import UsageError


def answered(name: str) -> bytes:
    return answer_line(Row(1, name, "/v1/completions", b"{}"), 200, "r", b'{"text":"\xc3\xa9"}')


@pytest.fixture
def place(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    return tmp_path


def test_a_kill_at_any_byte_loses_at_most_the_line_that_was_written(place):
    out = place / "out.jsonl"
    whole = answered("a") + answered("b")
    border = len(answered("a"))
    for cut in {*range(0, len(whole), 11), *range(border - 3, border + 4), len(whole) - 1, len(whole)}:
        out.write_bytes(whole[:cut])
        with Output(out, place / "rows.jsonl") as output:
            known = [name for name in "ab" if among(name, output.answered)]
            assert known == [name for name, end in (("a", len(answered("a"))), ("b", len(whole))) if cut >= end - 1]
            for name in "ab":
                if name not in known:
                    output.answer(answered(name))
        assert out.read_bytes() == whole, cut


@pytest.mark.parametrize(
    "content",
    [b"important", b"important\n", b'{"custom_id":"a","body":{}}\n', answered("a") + b"x\n" + answered("b"), b"\x00\n"],
)
def test_what_is_none_of_a_batchs_answers_is_left_as_it_is(place, content):
    for out in (place / "out.jsonl", place / "out.errors.jsonl"):
        out.write_bytes(content)
        with pytest.raises(UsageError, match="none of a batch's answers"):
            Output(place / "out.jsonl", place / "rows.jsonl")
        assert out.read_bytes() == content
        out.unlink()


def test_the_file_that_is_read_is_never_written(place):
    for out, source in (("rows.jsonl", "rows.jsonl"), ("x.jsonl", "x.errors.jsonl")):
        (place / source).write_bytes(b"{}")
        with pytest.raises(UsageError, match="the file that is read"):
            Output(place / out, place / source)
        assert (place / source).read_bytes() == b"{}"


def test_errors_are_those_of_the_last_run_and_no_file_without_any(place):
    out = place / "out.jsonl"
    errors = errors_beside(out)
    for name in ("a", "b"):
        with Output(out, place / "rows.jsonl") as output:
            output.error(error_line(Fault(1, name, "x", "y")))
        assert errors.read_bytes() == error_line(Fault(1, name, "x", "y"))
    with Output(out, place / "rows.jsonl"):
        pass
    assert not errors.exists() and out.exists()
    assert errors_beside(place / "answers") == place / "answers.errors"


def test_two_runs_do_not_write_one_file(place):
    with Output(place / "out", place / "rows.jsonl"), pytest.raises(UsageError, match="another kakera batch"):
        Output(place / "out", place / "rows.jsonl")


def test_a_place_that_can_not_be_written_is_wrong_usage(place):
    for other in (Path("/dev/null"), place):
        with pytest.raises(UsageError, match="is no file"):
            Output(other, place / "rows.jsonl")
    with pytest.raises(UsageError, match="No such file"):
        Output(place / "nowhere" / "out", place / "rows.jsonl")
