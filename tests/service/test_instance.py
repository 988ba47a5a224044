"""Who may hold a card and a port, what a killed holder leaves behind, and what is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kakera.errors import UsageError
from kakera.service.instance import Holder, claim, resources
from kakera.service.predecessor import NOISE, wait_for

ME = Holder(os.getpid(), "127.0.0.1:30000", "mini")


def test_names_follow_the_cards_that_cuda_sees() -> None:
    assert resources(0, 30000, None) == ("port 30000",)
    assert resources(2, 1, None) == ("port 1", "GPU 0", "GPU 1")
    assert resources(1, 1, "3,1") == ("port 1", "GPU 3")
    assert resources(1, None, None) == ("GPU 0",)


def test_a_second_claim_on_any_of_the_resources_names_the_holder_and_takes_nothing(tmp_path: Path) -> None:
    first = claim(("port 1", "GPU 0", "GPU 1"), ME, tmp_path)
    with pytest.raises(UsageError, match=f"GPU 1 is held by pid {os.getpid()}, which serves mini on 127.0.0.1:30000"):
        claim(("port 2", "GPU 1"), ME, tmp_path)
    claim(("port 2", "GPU 2"), ME, tmp_path).close(orderly=True)
    first.close(orderly=True)
    again = claim(("port 1", "GPU 0"), ME, tmp_path)
    assert not again.left
    again.close(orderly=True)


def test_a_killed_holder_frees_its_locks_and_leaves_its_name(tmp_path: Path) -> None:
    text = (
        "import os, sys, time; from pathlib import Path; from kakera.service.instance import Holder, claim\n"
        "held = claim(['GPU 0'], Holder(os.getpid(), 'a', 'm'), Path(sys.argv[1])); held.note_engine(os.getpid())\n"
        "print('held', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        assert other.stdout and other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"pid {other.pid}"):
            claim(["GPU 0"], ME, tmp_path)
        other.kill()
    mine = claim(["GPU 0"], ME, tmp_path)
    assert [(left.pid, left.engine) for left in mine.left] == [(other.pid, other.pid)]
    mine.close(orderly=False)
    assert [left.pid for left in claim(["GPU 0"], ME, tmp_path).left] == [os.getpid()]


def test_waiting_ends_when_the_engine_is_gone_and_memory_stands_still() -> None:
    used = [10 * 2**30, 10 * 2**30, 6 * 2**30, 2 * 2**30, 2**30]
    slept: list[float] = []
    left = (Holder(1, "a", "m"),)

    def now() -> int:
        return used.pop(0) if len(used) > 1 else used[0] - NOISE // 2

    assert wait_for(left, now, print, slept.append)
    assert 1.5 <= sum(slept) <= 3
    slept.clear()
    assert wait_for((), now, print, slept.append) and wait_for(left, lambda: 0, print, slept.append)
    assert not slept, "nothing to wait for after an orderly end, nor on a CPU"


def test_waiting_for_an_engine_that_stays_is_bounded_and_said() -> None:
    left = (Holder(1, "a", "m", os.getpid(), psutil.Process().create_time()),)
    slept: list[float] = []
    said: list[str] = []
    assert not wait_for(left, lambda: 0, said.append, slept.append)
    assert 29 <= sum(slept) <= 31 and len(said) == 2 and str(os.getpid()) in said[0] and "warning" in said[1]
    other = (Holder(1, "a", "m", os.getpid(), psutil.Process().create_time() - 100),)
    slept.clear()
    assert wait_for(other, lambda: 0, said.append, slept.append) and not slept, "a later process with the same id"
