"""What tests of several rooms share: a tiny model directory, and where the reference model lies, if anywhere.

No torch in here: the tests of the rooms without torch are not to wait for its import.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiny_model import write_tiny_model

if TYPE_CHECKING:
    from local_hub import LocalHub

# One thread, here and in the processes that tests start, unless a test sets its own: two OpenMP threads on two busy
# cores mostly wait for each other (kv 120 s and more with two, 22 s with one). Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And where a test has two, the one that waits sleeps: spinning took 41 s of CPU time where sleeping takes 13.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell ignores Ctrl-C for what it starts in the background, and so would the servers that tests send one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reference", type=Path, help="directory of the bf16 reference model, for the golden values")


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
