"""A conversation against the real scheduler and a scripted model, in this process."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from kakera.cli.conversation import Conversation, Settings, usage_line
from kakera.contract.events import Usage
from kakera.errors import UsageError
from kakera.run.scripted import Script, ScriptedRecipe
from kakera.server.model import ServedModel


def talk(tmp_path: Path, *streams: dict[str, object], **settings: object) -> tuple[Conversation, io.StringIO]:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"streams": streams}))
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    model = ServedModel.load(Script.load(path).tokenizer_dir, "scripted")
    wanted = Settings(**{"max_tokens": 50, **settings})  # type: ignore[arg-type]
    return Conversation(ScriptedRecipe(path)(), model, wanted, console, "Be brief."), out


def test_history_holds_answers_without_their_reasoning(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "<think>\nhm\n</think>\n\nYes."})
    assert chat.turn("really?") == "Yes."
    assert [m["content"] for m in chat.messages] == ["Be brief.", "really?", "Yes."]
    assert "hm" in out.getvalue() and "Yes." in out.getvalue()


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
    chat.restart("Be long.")
    assert chat.messages == [{"role": "system", "content": "Be long."}]


def test_interrupt_stops_the_answer_and_the_chat_goes_on(tmp_path: Path) -> None:
    chat, out = talk(tmp_path, {"text": "word " * 3000, "delay_ms": 1}, {"text": "Still here."}, max_tokens=2000)
    step, steps = chat.engine.step, []

    def interrupted_step() -> list:
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    chat.engine.step = interrupted_step  # type: ignore[method-assign]
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
    base = ServedModel("base", chat.model.tokenizer, None, chat.model.vocab, chat.model.eos)
    with pytest.raises(UsageError, match="no chat template"):
        Conversation(chat.engine, base, chat.settings, chat.console)


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
