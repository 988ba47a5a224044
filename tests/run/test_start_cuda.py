"""Kernels are compiled by the first start alone, all of them: not by the second, and not by a request of any length.
Skipped without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

START = """
import json, sys
from pathlib import Path
import kakera
from kakera.plan.planner import plan_for
from kakera.ops.cuda import compiler
from kakera.plan.plan import Wishes
from kakera.run.build import build_engine
from kakera.run.generate import generate
from kakera.contract.request import Request, Sampling

compiled, compile_source, caches = [], compiler.compile_source, [Path(argument) for argument in sys.argv[1:3]]
compiler.compile_source = lambda *what: compiled.append(what) or compile_source(*what)

def made():
    return [len(compiled), *(sorted(path.name for path in cache.rglob("*.cubin")) for cache in caches)]

model = Path(kakera.__file__).parent / "data" / "mini"
kv = sys.argv.pop()
wishes = Wishes(gpus="auto", context=4096, max_running=3, chunk=1024, host_cache=2**28, kv=kv)
engine = build_engine(model, plan_for(model, wishes))
found = [made()]
lengths = (1, 15, 16, 17, 64, 100, 999, 1024, 2500)
texts = [tuple(5 + i * j % 300 for i in range(length)) for j, length in enumerate(lengths)]
for part in (texts[:3], texts[3:4], texts[4:], texts[:7]):  # the last: hits, and rows that sample by other rules
    drawn = Sampling(max_tokens=3, seed=1, temperature=0.8, top_k=20, repetition_penalty=1.1)
    done = generate(engine, [Request(f"r{len(found)}.{i}", text, drawn) for i, text in enumerate(part)])
    assert all(one.finished.reason in ("length", "stop") for one in done.values()), done
    found.append(made())
print(json.dumps(found))
"""


def start(cache: Path, kv: str) -> list[list]:
    """For the time behind the start and behind each few requests: how many own kernels this process compiled, own
    kernels on disk, Triton's kernels on disk."""
    triton, own = cache / "triton", cache / "kakera" / "kernels"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": str(triton)}
    command = [sys.executable, "-c", START, str(own), str(triton), kv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def added(before: list, after: list) -> list[str]:
    """Names of kernels that came between two looks; Triton gives variants the same one."""
    return sorted(((Counter(after[1]) + Counter(after[2])) - (Counter(before[1]) + Counter(before[2]))).elements())


@pytest.mark.parametrize("kv", ["int2", "bf16"])
def test_the_second_start_compiles_nothing_and_neither_does_a_request(tmp_path, kv):
    first = start(tmp_path, kv)
    compiled, own, triton = first[0]
    assert compiled == len(own) > 5 and len(triton) > 5
    for before, after in pairwise(first):
        assert after[0] == before[0] and added(before, after) == []
    second = start(tmp_path, kv)
    assert all(after[0] == 0 and added(first[0], after) == [] for after in second)
