"""Weight bytes: exact for published checkpoints, read from headers, and clear about damaged files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kakera.arch.spec import ModelSpec
from kakera.plan import weights
from kakera.plan.weights import WeightBytes, from_checkpoint, from_config
from kakera.target.target import CPU, CUDA


def test_escha_27b_is_the_published_payload_to_the_byte(weights_27b: WeightBytes) -> None:
    # two shards of 5,337,335,240 + 4,815,752,984 bytes less their headers
    assert weights_27b.coded == 10_152_675_712


def test_a_decode_step_of_the_27b_reads_all_but_the_embedding(weights_27b: WeightBytes) -> None:
    assert weights_27b.read_per_token(CUDA, 1) == 10_152_675_712 - (248_320 * 5120 + 248_320 * 2)


def test_coded_parameters_of_the_27b(spec_27b: ModelSpec) -> None:
    assert sum(spec_27b.kinds.values()) == 24_326_963_200


def test_ranks_hold_norms_and_scales_of_what_is_not_cut_and_their_share_of_the_rest(weights_27b: WeightBytes) -> None:
    for ranks in (2, 4):
        held = [weights_27b.of_rank(rank, ranks) for rank in range(ranks)]
        biases = 64 * 2 * 5120 * 2  # of o_proj, out_proj and down_proj, whose outputs are summed
        assert sum(held) == weights_27b.coded + (ranks - 1) * weights_27b.replicated
        assert held == [max(held), *[max(held) - biases] * (ranks - 1)]
        assert weights_27b.on_device(CUDA, ranks) == held[0]
    assert 12e6 < weights_27b.replicated < 15e6


@pytest.mark.parametrize("linear_bytes", [2, 4])
def test_a_cpu_holds_linears_in_16_bit_or_all_in_fp32(
    spec_small: ModelSpec, monkeypatch: pytest.MonkeyPatch, linear_bytes: int
) -> None:
    monkeypatch.setattr(weights, "CPU_LINEAR_BYTES", linear_bytes)
    found = from_config(spec_small, {})
    in_linears = sum(spec_small.kinds.values()) + 512 * (2 * 12 * 9 + 16384)  # b, a, head
    values = found.coded // 2
    assert found.on_device(CPU, 1) == 4 * values - (4 - linear_bytes) * in_linears


def test_exl3_scales_with_its_bits(spec_27b: ModelSpec) -> None:
    two, four = (
        from_config(spec_27b, {"quantization_config": {"quant_method": "exl3", "bits": b}}) for b in (2.0, 4.0)
    )
    assert four.coded - two.coded == 24_326_963_200 * 2 // 8


def test_header_bytes_leave_out_draft_layers_and_vision(tmp_path: Path, spec_small: ModelSpec) -> None:
    table, norm = np.zeros((10, 4), np.float16), np.zeros(4, np.float16)
    save_file(
        {
            "model.embed_tokens.weight": table,
            "model.norm.weight": norm,
            "mtp.fc.weight": table,
            "model.visual.x": table,
        },
        tmp_path / "model.safetensors",
    )
    found = from_checkpoint(tmp_path, spec_small)
    assert (found.coded, found.embedding, found.replicated) == (88, 80, 8)
