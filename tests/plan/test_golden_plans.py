"""Plans keep their bytes: every row of some, as they were on 30 November 2026, or of several cards on 1 December
(golden_plans.json).

A change of them that is meant is written down by `python tests/plan/test_golden_plans.py`.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from machines import cards, laptop

from kakera.arch.registry import spec_of
from kakera.arch.spec import ModelSpec
from kakera.plan.known import KNOWN
from kakera.plan.plan import Wishes
from kakera.plan.search import draft
from kakera.plan.speed import predict
from kakera.plan.weights import CPU_LINEAR_BYTES, WeightBytes, from_config
from kakera.target.devices import Machine
from random_model import ESCHA

GOLDEN = Path(__file__).with_name("golden_plans.json")
MACHINES = {
    "laptop": laptop(32),
    "12GB beside others": cards(12, used=100_000_000),
    "2 x 12GB": cards(12, 12),
    "143GB": cards(143.8, ram_gb=512),
    "16 + 24GB": cards(16, 24),
    "4 x 80GB": cards(80, 80, 80, 80, ram_gb=128),
}
WISHES = {
    "all chosen": Wishes(gpus="named"),
    "bf16": Wishes(gpus="named", kv="bf16", context=32768, max_running=2),
    "fp32": Wishes(gpus="named", kv="fp32", context=4096, chunk=256, host_cache=0),
    "long": Wishes(gpus="named", context=262144, max_running=1, chunk=8192, state_dtype="fp32"),
    "small groups": Wishes(gpus="named", kv_group=64, kv_window=512, context=65536, host_cache=3_000_000_001),
    "rotation": Wishes(gpus="named", rotation="a directory"),
    "five groups a head": Wishes(gpus="named", kv_group=32, context=8192),
}
EXL3 = {"quant_method": "exl3", "bits": 3.0, "head_bits": 6}
QWEN3 = {
    "model_type": "qwen3",
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 262144,
    "rope_theta": 1e7,
    "quantization_config": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "27B": KNOWN["qwen3.8-27b"],
    "9B in 16 bit": KNOWN["qwen3.5-9b-bf16"],
    "tied, heads of 64": {**KNOWN["qwen3.5-9b-bf16"], "head_dim": 64, "tie_word_embeddings": True},
    "small qwen3": {**ESCHA, **QWEN3},
    "exl3": {**KNOWN["qwen3.5-9b-bf16"], "quantization_config": EXL3},
}


@cache
def shape(model: str) -> tuple[ModelSpec, WeightBytes]:
    spec = spec_of(MODELS[model])
    return spec, from_config(spec, MODELS[model])


def found(model: str, machine: Machine, wishes: Wishes) -> list[Any]:
    """Sizes of the plan, what is left of both memories, bytes of each row by name, and predicted speeds."""
    spec, weights = shape(model)
    made = draft(spec, wishes, machine, weights)
    plan, speed = made.plan, predict(made.plan, machine, weights)
    sizes = (plan.context, plan.pages, plan.slots, plan.chunk, plan.state_dtype, plan.host_cache)
    records = (plan.checkpoint_bytes, plan.sink_bytes, plan.page_bytes, made.room, made.host_room)
    rates = [rate and round(rate, 3) for rate in (speed.decode_short, speed.decode_full, speed.prefill)]
    return [*sizes, *records, {row.name: row.bytes for row in plan.rows}, rates]


def every() -> dict[str, list[Any]]:
    cases = product(MODELS, MACHINES, WISHES)
    return {f"{n}; {m}; {w}": found(n, MACHINES[m], WISHES[w]) for n, m, w in cases}


@pytest.mark.skipif(CPU_LINEAR_BYTES != 2, reason="a CPU without FBGEMM holds its linears in float32")
def test_every_row_has_the_bytes_it_had():
    golden = json.loads(GOLDEN.read_text())
    assert every() == golden


if __name__ == "__main__":
    GOLDEN.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in every().items()) + "\n}\n")
