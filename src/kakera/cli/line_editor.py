"""The line that a message is typed on: editing, history across sessions, pasted text as one message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

HISTORY_BYTES = 1 << 20  # beyond it the older half goes at the next start
HISTORY_MODE = 0o600  # it holds what somebody said


class History(FileHistory):
    """FileHistory's form in a file of bounded size that only its owner reads. Where it can not be written, the history
    ends with the session."""

    def __init__(self, path: Path):
        self._path = path
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=HISTORY_MODE)
            if path.stat().st_size > HISTORY_BYTES:
                path.write_bytes(_newer_half(path.read_bytes()))
        super().__init__(str(path))

    def load_history_strings(self) -> Iterator[str]:
        """Newest first."""
        with contextlib.suppress(OSError):
            yield from super().load_history_strings()

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def _newer_half(data: bytes) -> bytes:
    """From an entry's beginning on."""
    start = data.find(b"\n# ", len(data) - HISTORY_BYTES // 2)
    return data[start:] if start >= 0 else b""


class LineEditor:
    """`words` are completed with Tab."""

    def __init__(self, history: Path, words: Sequence[str]):
        self._session: PromptSession[str] = PromptSession(
            history=History(history),
            key_bindings=_keys(),
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            enable_open_in_editor=True,  # Ctrl-X Ctrl-E
            prompt_continuation="  ",
            output=create_output(always_prefer_tty=True),  # where stdout goes into a file, the line is on stderr
        )

    def read(self) -> str:
        """The next message, without broken letters. Raises EOFError (Ctrl-D), KeyboardInterrupt (Ctrl-C)."""
        return self._session.prompt("> ").encode("utf-8", "replace").decode()


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
