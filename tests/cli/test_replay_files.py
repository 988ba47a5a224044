"""Recordings by the command line: what can not be replayed is refused in words, and an empty run is all equal."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from kakera.cli.replay import replay
from kakera.contract.recording import Header, Recorder
from kakera.errors import UsageError
from kakera.plan.plan import Wishes


def run(file: Path) -> None:
    replay(file, None, None, cold=True, as_json=True)


@pytest.mark.parametrize(
    "wishes", [{"context": "x"}, {"gpus": None}, {"gpus": 5}, {"kv": 7}, {"nonsense": 1}, {"context": -1}]
)
def test_memory_options_of_another_kind_are_refused(tiny_model: Path, tmp_path: Path, wishes: dict) -> None:
    Recorder(tmp_path / "run", Header(1, "0", str(tiny_model), {"gpus": "cpu", **wishes}, 320, 8, True))
    with pytest.raises(UsageError):
        run(tmp_path / "run")


def test_a_recording_of_no_steps_is_all_equal(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    wishes = asdict(Wishes(gpus="cpu", context=2048, state_dtype="fp32"))
    Recorder(tmp_path / "run", Header(1, "0", str(tiny_model), wishes, 320, 8, True))
    run(tmp_path / "run")
    assert '"differences": []' in capsys.readouterr().out


@pytest.mark.parametrize("file", ["/dev/null", "/dev/zero", "/", "/nowhere"])
def test_what_is_no_file_is_refused(file: str) -> None:
    with pytest.raises(UsageError):
        run(Path(file))
