"""A thread with a large stack, for native code that recurses as deep as a client's grammar goes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 256 * 1024**2  # of addresses; memory is what is touched. The deepest that is let through takes 90 MB
_creating = threading.Lock()  # the size is the whole process's
Result = TypeVar("Result")


def on_deep_stack(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, from a thread of its own (0.1 ms)."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _creating:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return done.result()
