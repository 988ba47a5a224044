"""What tests of several rooms share: a tiny model directory, and where the reference model lies, if anywhere.

No torch in here: the tests of the rooms without torch are not to wait for its import.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tiny_model import write_tiny_model

if TYPE_CHECKING:
    from local_hub import LocalHub

# One thread, here and in the processes that tests start, unless a test sets its own: two OpenMP threads on two busy
# cores mostly wait for each other (kv 120 s and more with two, 22 s with one). Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And where a test has two, the one that waits sleeps: spinning took 41 s of CPU time where sleeping takes 13.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Processes that tests start keep what they compile, else each compiles all of kakera again (0.2 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What is imported and collected stays to the end: a million objects that no collection needs to look through.
gc.disable()

# The same examples in every run, so that no run fails by chance, and no example for its seconds. With
# `--hypothesis-profile=random` each run tries others; a failure becomes an `@example` or a test of its own.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("fixed")

# A shell ignores Ctrl-C for what it starts in the background, and so would the servers that tests send one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reference", type=Path, help="directory of the bf16 reference model, for the golden values")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else what is in circles never ends, and libraries complain of it


def pytest_runtest_setup() -> None:
    """What a test draws does not depend on the tests that its worker had before."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def reference(request: pytest.FixtureRequest) -> Path:
    """The reference model's directory; the test is skipped without it."""
    directory = request.config.getoption("--reference")
    if directory is None:
        pytest.skip("the bf16 reference model is not part of the repository; give its directory with --reference DIR")
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model directory with random weights: 3 GDN + 1 full-attention layers, a byte tokenizer, a template."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a vision tower (`seeing_model.py`)."""
    from seeing_model import write_seeing_model

    directory = tmp_path_factory.mktemp("seeing")
    write_seeing_model(directory)
    return directory


@pytest.fixture(scope="session")
def hub_server() -> Iterator[LocalHub]:
    from local_hub import LocalHub

    server = LocalHub()
    yield server
    server.close()


@pytest.fixture
def hub(hub_server: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    """An empty hub on this machine, which the hub's library asks, with an empty cache in `tmp_path / "hub"`."""
    from local_hub import heard

    hub_server.forget()
    heard(hub_server, tmp_path / "hub", monkeypatch)
    return hub_server


@pytest.fixture(scope="module")
def one_tokenizer() -> Iterator[None]:
    """Scripted models of a module read the bundled tokenizer once (0.15 s of CPU time)."""
    from kakera.text.tokenizer import Tokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", staticmethod(functools.cache(Tokenizer.load)))
        yield
