"""A command in this process, which has imported what commands need: two seconds of CPU time less than one of its own.

What it prints and its exit status are those of a process; that a process ends so, tests of cli/ show for some.
"""

from __future__ import annotations

import contextlib
import io
import subprocess

import pytest


def run(*arguments: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`given` is what is piped in."""
    from kakera.cli import main

    out, errors, status = io.StringIO(), io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["kakera", *arguments])
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        for name, value in environment.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                main()
            except SystemExit as end:
                status = end.code
    assert status is None or isinstance(status, int), status
    return subprocess.CompletedProcess(arguments, status or 0, out.getvalue(), errors.getvalue())
