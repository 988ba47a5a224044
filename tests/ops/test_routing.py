"""Routing by a table of cases, grouping and the sum: the same for a row in any company, ties to the lower expert."""

from __future__ import annotations

import pytest
import torch

from kakera.ops.moe import combine, group, route

HUGE = 3e38
TABLE = {
    "by size": ([0.5, 3.0, -1.0, 2.0, 1.0], [1, 3, 4]),
    "all negative": ([-9.0, -3.0, -7.0, -3.5, -100.0], [1, 3, 2]),
    "all equal": ([0.25] * 5, [0, 1, 2]),
    "all equal and negative": ([-0.25] * 5, [0, 1, 2]),
    "a tie at the edge": ([1.0, 5.0, 1.0, 4.0, 1.0], [1, 3, 0]),
    "ties in front": ([2.0, 7.0, 7.0, 7.0, 1.0], [1, 2, 3]),
    "zeros of both signs": ([-0.0, 0.0, -1.0, 0.0, -1.0], [0, 1, 3]),
    "one huge": ([0.0, 1.0, HUGE, 2.0, -HUGE], [2, 3, 1]),
    "close, and apart": ([1.0, 1.0 + 2**-23, 1.0 + 2**-22, 0.0, 0.0], [2, 1, 0]),
}


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_are_chosen_and_the_lower_one_of_equals(case, dtype):
    logits, expected = TABLE[case]
    if dtype == torch.bfloat16 and case == "close, and apart":
        expected = [0, 1, 2]  # equal there
    logits_1E = torch.tensor([logits]).to(dtype)
    expert_TK, share_TK = route(logits_1E, 3)
    assert expert_TK.tolist() == [expected]
    all_E = logits_1E.double().softmax(-1)[0, expected]
    torch.testing.assert_close(share_TK[0].double(), all_E / all_E.sum(), rtol=1e-6, atol=1e-7)
    assert share_TK.dtype == torch.float32 and share_TK.isfinite().all()


@pytest.mark.parametrize(("experts", "top"), [(7, 1), (22, 11), (256, 8), (300, 10), (513, 513)])
def test_a_row_is_routed_alike_in_any_company(experts, top):
    """Also where logits of 16 bit make ties by the dozen."""
    logits_TE = torch.randn(70, experts, generator=torch.Generator().manual_seed(experts)).bfloat16()
    logits_TE = (logits_TE * 2).round() / 2
    expert_TK, share_TK = route(logits_TE, top)
    for row in (0, 33, 69):
        alone = route(logits_TE[row : row + 1], top)
        assert torch.equal(alone[0][0], expert_TK[row]) and torch.equal(alone[1][0], share_TK[row])
        order = sorted(range(experts), key=lambda e: (-logits_TE[row, e].item(), e))
        assert expert_TK[row].tolist() == order[:top]


def test_groups_hold_every_slot_once_in_order():
    expert_TK = torch.tensor([[3, 0], [3, 5], [0, 3], [5, 3]])
    groups = group(expert_TK, 7)
    assert [slots.tolist() for slots in groups] == [[1, 4], [], [], [0, 2, 5, 7], [], [3, 6], []]
    everyone = group(torch.zeros(64, 1, dtype=torch.int64), 3)
    assert [slots.tolist() for slots in everyone] == [list(range(64)), [], []]


def test_the_sum_goes_slot_by_slot_in_float32():
    slot_SH = torch.tensor([[1.0], [1e8], [-1e8], [4.0], [2.0], [1.0]])
    share_TK = torch.tensor([[1.0, 1.0, 1.0], [0.5, 0.25, 0.25]])
    assert combine(slot_SH, share_TK).tolist() == [[0.0], [2.75]]  # 1 is lost beside 1e8 in this order
    assert combine(slot_SH.bfloat16(), share_TK).dtype == torch.float32
    slot_SH, share_TK = torch.randn(50 * 11, 96), torch.rand(50, 11)
    whole = combine(slot_SH, share_TK)
    assert torch.equal(combine(slot_SH[110:121], share_TK[10:11])[0], whole[10])
