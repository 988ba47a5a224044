"""A terminal with a program in it: what a person types, and what then stands on the screen."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import time

PATIENCE = 90.0  # seconds: the machine may be busy
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][0-9A-B]|\x1b[=>78]|\x1b\][^\x07]*\x07")


class Terminal:
    """Use as a context manager, which kills what still runs."""

    def __init__(self, command: list[str], **environment: str):
        self._ours, theirs = os.openpty()
        self.seen = ""  # all of it, without escape sequences
        self.raw = ""
        self._read = 0  # of `seen`, by `expect`
        self.process = subprocess.Popen(
            command,
            preexec_fn=lambda: os.login_tty(theirs),  # so that Ctrl-C is a signal
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            close_fds=False,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def paste(self, text: str) -> None:
        """As terminals do: line breaks are what Enter sends."""
        text = text.replace("\n", "\r")
        self.type(f"\x1b[200~{text}\x1b[201~")

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until it stands behind what was expected before."""
        end = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.seen[self._read :])):
            assert time.monotonic() < end and self._more(end), f"{pattern!r} is not in {self.seen[self._read :]!r}"
        self._read += found.end()
        return found

    def prompt(self) -> None:
        """Wait until a message can be typed."""
        self.expect(r"(^|\n|\r)> ?\x08?")

    def wait(self) -> int:
        """The exit status, when it has ended."""
        end = time.monotonic() + PATIENCE
        while self._more(end):
            pass
        return self.process.wait(timeout=PATIENCE)

    def _more(self, end: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
        data = b""
        with contextlib.suppress(OSError):  # EIO: nobody holds the other side any more
            data = os.read(self._ours, 65536) if ready else b""
        self.raw += data.decode("utf-8", "replace")
        self.seen = ESCAPES.sub("", self.raw)
        return bool(data)
