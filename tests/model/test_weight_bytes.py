"""The weights that a plan counts for a CPU are the weights that a loaded model holds."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kakera.model.qwen3_5 import HybridModel
from kakera.plan.weights import from_checkpoint
from kakera.target.target import CPU
from tiny_model import write_tiny_model


def held_bytes(weights) -> int:
    """Bytes of every tensor and packed weight below a record, each storage once."""
    found: dict[int, int] = {}
    pending = [weights]
    while pending:
        thing = pending.pop()
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, torch.ScriptObject):
            found[id(thing)] = 2 * torch.ops.quantized.linear_unpack_fp16(thing)[0].numel()
        elif isinstance(thing, tuple):
            pending += thing
        elif is_dataclass(thing):
            pending += (getattr(thing, field.name) for field in fields(thing))
    return sum(found.values())


@pytest.mark.parametrize("tied", [False, True])
def test_a_cpu_holds_what_the_plan_counts(tmp_path: Path, tied: bool) -> None:
    write_tiny_model(tmp_path)
    if tied:
        file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
        save_file({name: t for name, t in load_file(file).items() if name != "lm_head.weight"}, file)
        config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    model = HybridModel.load(tmp_path)
    planned = from_checkpoint(tmp_path, model.spec).on_device(CPU, 1)
    assert held_bytes(model.weights) == pytest.approx(planned, rel=0.02)
