"""Lines of a batch: what is a request, what is an error and says which, and files in which two have one name."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from kakera.batch import lines
from kakera.batch.lines import Fault, Row, answer_line, error_line, parse, read, survey
from kakera.errors import UsageError

CHAT = "/v1/chat/completions"


def line(**more) -> bytes:
    row = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}, **more}
    return json.dumps({name: value for name, value in row.items() if value is not ...}).encode()


def test_a_request_keeps_its_body_byte_for_byte():
    body = b'{"x" : 1.0,  "y":"\\u00e9", "stream":false}'
    raw = b'{"custom_id":"a","method":"POST","url":"/v1/completions","more":1,"body":' + body + b"}\r\n"
    assert parse(7, raw) == Row(7, "a", "/v1/completions", body)


@pytest.mark.parametrize(
    ("raw", "code", "name"),
    [
        (b"not json", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"custom_id":"a"', "invalid_json_line", None),
        (b'{"custom_id":"\xff"}', "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (line(custom_id=...), "invalid_custom_id", None),
        (line(custom_id=3), "invalid_custom_id", None),
        (line(custom_id=""), "invalid_custom_id", None),
        (line(method="GET"), "invalid_method", "a"),
        (line(url="/v1/embeddings"), "invalid_url", "a"),
        (line(url=[CHAT]), "invalid_url", "a"),
        (line(url=...), "invalid_url", "a"),
        (line(body=...), "invalid_body", "a"),
        (line(body=[1]), "invalid_body", "a"),
        (line(body={"stream": True}), "invalid_body", "a"),
    ],
)
def test_a_malformed_line_says_what_is_wrong_and_where(raw, code, name):
    fault = parse(12, raw)
    assert isinstance(fault, Fault) and (fault.code, fault.custom_id) == (code, name) and "line 12" in fault.message
    written = json.loads(error_line(fault))
    assert written["custom_id"] == name and written["response"] is None and written["error"]["code"] == code


def test_blank_lines_marks_and_line_ends_are_no_matter(tmp_path):
    file = tmp_path / "rows"
    file.write_bytes(b"\xef\xbb\xbf" + line() + b"\r\n\n  \n" + line(custom_id="b"))
    assert [(row.number, row.custom_id) for row in read(file)] == [(1, "a"), (4, "b")]


def test_a_line_that_is_too_long_is_an_error_and_is_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MOST_BYTES", 1000)
    file = tmp_path / "rows"
    file.write_bytes(b"x" * 50_000 + b"\n" + line() + b"\n" + b"y" * 5000)
    assert [getattr(each, "code", each.custom_id) for each in read(file)] == ["line_too_large", "a", "line_too_large"]


def test_two_lines_of_one_name_are_refused_before_anything_is_asked(tmp_path):
    file = tmp_path / "rows"
    names = ["a", "b", "c", "b", "a", "a"]
    file.write_bytes(b"\n".join(line(custom_id=name, url=CHAT if i else "/wrong") for i, name in enumerate(names)))
    with pytest.raises(UsageError, match=r"lines \d and \d have the same custom_id '[ab]', and 2 more"):
        survey(file)


@pytest.mark.parametrize("content", [b"", b"\n \n", None])
def test_a_file_without_lines_is_wrong_usage(tmp_path, content):
    if content is not None:
        (tmp_path / "rows").write_bytes(content)
    with pytest.raises(UsageError):
        survey(tmp_path / "rows")


def test_memory_does_not_grow_with_the_file(tmp_path):
    file = tmp_path / "rows"
    with file.open("wb") as rows:
        rows.writelines(line(custom_id=f"row-{i}") + b"\n" for i in range(6_000))
    tracemalloc.start()
    assert survey(file) == sum(1 for _ in read(file)) == 6_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6_000 * 60, "names alone would be more"


def test_an_answer_is_one_line_in_openais_form():
    row = Row(1, "é", CHAT, b"{}")
    written = answer_line(row, 200, "req_1", b'{\n  "id": "x",\n  "n": 1.50\n}')
    assert written.count(b"\n") == 1 and b'{"id":"x","n":1.50}' in written
    found = json.loads(written)
    assert found["response"] == {"status_code": 200, "request_id": "req_1", "body": {"id": "x", "n": 1.5}}
    assert found["custom_id"] == "é" and found["error"] is None and found["id"].startswith("batch_req_")
    assert json.loads(answer_line(row, 502, "", b"<html>"))["response"]["body"] == "<html>"
