"""A conversation against the real scheduler and a scripted model, in this process."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from kakera.cli.chat import obey
from kakera.cli.conversation import Conversation, Settings, usage_line
from kakera.cli.local_answers import LocalModel
from kakera.contract.events import Usage
from kakera.errors import UsageError
from kakera.run.scripted import Script, ScriptedRecipe
from kakera.server.model import ServedModel

pytestmark = pytest.mark.usefixtures("one_tokenizer")


class Talk(Conversation):
    """With the model at hand."""

    def __init__(self, model: LocalModel, console: Console, system: str):
        super().__init__(model, console, system)
        self.model = model


def talk(tmp_path: Path, *streams: dict[str, object], **settings: object) -> tuple[Talk, io.StringIO]:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"streams": streams}))
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    model = ServedModel.load(Script.load(path).tokenizer_dir, "scripted")
    wanted = Settings(**{"max_tokens": 50, **settings})  # type: ignore[arg-type]
    return Talk(LocalModel(ScriptedRecipe(path)(), model, wanted), console, "Be brief."), out


def test_history_holds_answers_without_their_reasoning(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "<think>\nhm\n</think>\n\nYes."})
    assert chat.turn("really?") == "Yes."
    assert [m["content"] for m in chat.messages] == ["Be brief.", "really?", "Yes."]
    assert "hm\n\nYes.\n" in out.getvalue()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nhm\n</think>\n\n</think>\n\nYes.", "Yes."),
        ("</think>\n\nYes.", "Yes."),
        ("<think>\nhm\n</think>\n\nw7\n</think>\n\nYes.", "w7\n\n\nYes."),
        ("It is `</think>`.", "It is `</think>`."),
    ],
)
def test_what_the_server_does_not_show_the_terminal_does_not_show(tmp_path: Path, text: str, answer: str) -> None:
    chat, out = talk(tmp_path, {"text": text})
    assert chat.turn("really?") == answer
    assert out.getvalue().count("</think>") == answer.count("</think>")


def test_second_turn_reuses_the_first(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "word " * 40}, {"text": "Bye."})
    chat.turn("please say something long " * 20)
    chat.turn("and now?")
    cached = int(out.getvalue().rsplit("[", 1)[1].split()[0])
    assert cached >= 64


def test_new_forgets_messages_but_keeps_the_system_message(tmp_path: Path) -> None:
    chat, _ = talk(tmp_path, {"text": "Yes."})
    chat.turn("one")
    chat.restart()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert obey(chat, "/system Be long.\nAnd kind.")
    assert chat.messages == [{"role": "system", "content": "Be long.\nAnd kind."}]


def test_interrupt_stops_the_answer_and_the_chat_goes_on(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "word " * 3000, "delay_ms": 1}, {"text": "Still here."}, max_tokens=2000)
    step, steps = chat.model.engine.step, []

    def interrupted_step() -> list:
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    chat.model.engine.step = interrupted_step  # type: ignore[method-assign]
    assert 1 <= len(chat.turn("go").split()) < 20
    assert "interrupted" in out.getvalue()
    assert chat.turn("and?") == "Still here."


def test_refused_message_is_forgotten(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "Yes."})
    assert chat.turn("word " * 9000) == ""
    assert [m["role"] for m in chat.messages] == ["system"]
    assert "maximum context length is 4096 tokens" in out.getvalue()


def test_base_model_can_not_chat(tmp_path: Path) -> None:
    chat, _ = talk(tmp_path, {"text": "Yes."})
    model = chat.model.model
    base = ServedModel("base", model.tokenizer, None, model.vocab, model.eos)
    with pytest.raises(UsageError, match="no chat template"):
        LocalModel(chat.model.engine, base, chat.model.settings)


@pytest.mark.parametrize(
    "line",
    ["/etc/passwd: what is it?", "/nonsense", "/new idea, please", "/quit smoking?", "/helpful", " /help", "/systemd"],
)
def test_what_is_no_command_is_sent(tmp_path: Path, line: str) -> None:
    chat, _ = talk(tmp_path, {"text": "Yes."})
    assert obey(chat, line)
    assert [m["content"] for m in chat.messages] == ["Be brief.", line.strip(), "Yes."]


def test_system_is_shown_set_and_removed_in_words(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "Yes."})
    chat.turn("one")
    assert obey(chat, "/system") and "the system message is: Be brief." in out.getvalue()
    assert len(chat.messages) == 3, "showing it forgets nothing"
    assert obey(chat, "/system  none ") and chat.messages == [] and "there is no system message" in out.getvalue()
    assert obey(chat, "") and obey(chat, "/help") and "/system TEXT" in out.getvalue()
    assert not obey(chat, "/quit") and not obey(chat, "/exit ")


def test_an_answer_steers_no_terminal(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "a\x1b[2Jb\tc\n\x07d \u202eרtl"})
    assert "\x1b[2J" in chat.turn("go"), "the model reads what it said"
    assert "a\\x1b[2Jb" in out.getvalue() and "\x1b" not in out.getvalue() and "\x07" not in out.getvalue()


def test_a_message_without_an_answer_is_forgotten(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "<think>\nhm"}, {"text": "Yes."})
    assert chat.turn("one") == "" and "the message is forgotten" in out.getvalue()
    assert chat.turn("two") == "Yes." and [m["content"] for m in chat.messages] == ["Be brief.", "two", "Yes."]


def test_usage_line_counts_speed_after_the_first_token() -> None:
    usage = Usage(100, 64, 11, queue_seconds=0.5, prefill_seconds=1.0, decode_seconds=2.0)
    line = usage_line(usage, "length")
    assert "64 of 100 prompt tokens cached" in line and "1.50 s" in line and "11 tokens at 5.0 tok/s" in line
    assert "--max-tokens" in line


def test_usage_line_says_why_nothing_was_cached() -> None:
    assert "0 of 57 prompt tokens cached (shorter than a page)," in usage_line(
        Usage(57, 0, 1, "shorter than a page"), "stop"
    )
    assert "64 of 100 prompt tokens cached," in usage_line(Usage(100, 64, 1, "diverged at token 70"), "stop")
