import io

import pytest
from rich.console import Console

from tools import demo, demo_text


def test_each_fact_stands_once_in_the_passage_and_far_from_the_other():
    text = demo_text.first_message()
    places = []
    for fact in (demo_text.FIRST, demo_text.SECOND):
        assert text.count(fact.answer) == 1
        assert f"\n\n{fact.sentence}\n\n" in text
        places.append(text.index(fact.sentence) / len(text))
    assert 0.2 < places[0] < 0.5 < places[1] < 0.9
    assert text.endswith(demo_text.FIRST.question)
    assert len(text) > 35_000


def test_an_answer_counts_as_right_by_word():
    assert demo_text.FIRST.right("The code is 7204193.")
    assert not demo_text.FIRST.right("72041930")


def test_the_demo_ends_with_a_command_that_works_where_it_ran(tmp_path, monkeypatch):
    command = tmp_path / ".venv" / "bin" / "kakera"
    command.parent.mkdir(parents=True)
    command.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(command.with_name("python")))
    monkeypatch.setenv("PATH", "")
    assert demo._command() == ".venv/bin/kakera"
    monkeypatch.setenv("PATH", str(command.parent))
    assert demo._command() == "kakera"


@pytest.mark.slow
def test_the_demo_fails_when_the_model_answers_wrong(tiny_model, monkeypatch):
    """Random weights find nothing; everything else is the real thing."""
    monkeypatch.setattr(demo_text, "PASSAGE_CHARS", 1500)
    seen = io.StringIO()
    assert demo.main(str(tiny_model), Console(file=seen, width=120)) == 1
    shown = seen.getvalue()
    assert "An answer is wrong." in shown
    assert "of these cached" in shown and "bytes a token in int2" in shown and "requests at once of up to" in shown
