"""StatePool moves states between slots and checkpoints."""

import torch
from model_world import Harness, Row


def test_save_then_load_into_another_slot(harness: Harness, tokens: torch.Tensor):
    harness.prefill(tokens[:64], [], slot=0)
    checkpoint = harness.checkpoint(64)
    harness.states.save(0, checkpoint)
    harness.states.load(2, checkpoint)
    for a, b in zip(harness.state(0), harness.state(2), strict=True):
        assert a.abs().max() > 0
        assert torch.equal(a, b)


def test_reset_forgets_one_slot_only(harness: Harness, tokens: torch.Tensor):
    harness.run(Row(tokens[:64], 0, 0), Row(tokens[:64], 0, 1))
    kept = harness.state(1)
    harness.states.reset(0)
    assert all(not part.any() for part in harness.state(0))
    assert all(torch.equal(a, b) for a, b in zip(kept, harness.state(1), strict=True))
