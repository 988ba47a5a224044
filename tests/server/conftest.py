"""Fixtures: a served model, servers to start, and one that a module shares."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_server import HELLO, MINI, Live, start

from kakera.server.model import ServedModel


@pytest.fixture(scope="module", autouse=True)
def share_the_tokenizer(one_tokenizer: None) -> None:
    pass


@pytest.fixture(scope="session")
def model() -> ServedModel:
    return ServedModel.load(MINI, "mini")


@pytest.fixture
def serve(model: ServedModel, tmp_path: Path) -> Iterator[Callable[..., Live]]:
    with contextlib.ExitStack() as stack:
        yield lambda streams, **options: stack.enter_context(start(model, tmp_path / "script.json", streams, **options))


@pytest.fixture(scope="module")
def live(model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a fixed script, shared by a module's tests."""
    with start(model, tmp_path_factory.mktemp("live") / "script.json", HELLO) as server:
        yield server


@contextlib.contextmanager
def untouched_logging() -> Iterator[None]:
    """`serve` configures the process's loggers; a later test would then miss its log lines."""
    loggers = [logging.getLogger(name) for name in ("kakera", "kakera.requests")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (logger.handlers, logger.propagate, level) in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def logging_of_a_module() -> Iterator[None]:
    """Also of servers that a module shares."""
    with untouched_logging():
        yield


@pytest.fixture(autouse=True)
def logging_of_a_test() -> Iterator[None]:
    with untouched_logging():
        yield
