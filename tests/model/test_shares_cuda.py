"""Two processes share a coded model on NVIDIA GPUs, by the kernel through host memory. Needs one GPU; better two.

Prints the divergence from one rank: that of sums in another order, in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from share_pair import passes, run

from random_model import write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HIDDEN = 1024
CONFIG = {
    "random_weights": 5,
    "vocab_size": 640,
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def test_two_ranks_on_cards_compute_what_one_does(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", **CONFIG)
    segment = Path(f"/dev/shm/{tmp_path.name}-{directory.name}")
    barrier = multiprocessing.get_context("spawn").Barrier(2)
    try:
        multiprocessing.spawn(run, args=(directory, HIDDEN, barrier), nprocs=2)
    finally:
        segment.unlink(missing_ok=True)
    (hidden_TH, logits_TV), (other_TH, nothing_TV) = (torch.load(tmp_path / f"found-{rank}.pt") for rank in range(2))
    assert torch.equal(hidden_TH, other_TH), "both ranks have the same stream, to the bit"
    assert nothing_TV.shape == (len(logits_TV), 0)
    _, alone_TV = passes(directory, torch.device("cuda", 0))
    ours, theirs = alone_TV.log_softmax(-1), logits_TV.log_softmax(-1)
    divergence = (ours.exp() * (ours - theirs)).sum(-1)
    print(f"KLD mean {divergence.mean():.2e}, worst {divergence.max():.2e}; {torch.cuda.device_count()} GPUs")
    assert divergence.mean() < 1e-3
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.95
