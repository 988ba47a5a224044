"""The online softmax: blocks of keys, and rows that are joined and split, change nothing beyond rounding."""

from __future__ import annotations

import torch

from kakera.kv.plain.softmax import OnlineSoftmax, PlainBlock


def state_of(q_BMD: torch.Tensor, blocks: list[PlainBlock]) -> OnlineSoftmax:
    state = OnlineSoftmax(blocks[0].scores(q_BMD), blocks[0])
    for block in blocks[1:]:
        state.add(block.scores(q_BMD), block)
    return state


def test_rows_can_be_joined_for_a_block_and_split_again():
    torch.manual_seed(0)
    q_PBMD = torch.randn(3, 2, 5, 16)
    first, second, third = (PlainBlock(torch.randn(2, 2, 7, 16)) for _ in range(3))
    alone = [state_of(q_BMD, [first, second, third]).result() for q_BMD in q_PBMD]
    together = OnlineSoftmax.join([state_of(q_BMD, [first]) for q_BMD in q_PBMD])
    together.add(second.scores(q_PBMD.transpose(0, 1).flatten(1, 2)), second)
    parts = together.split(3)
    for q_BMD, part in zip(q_PBMD, parts, strict=True):
        part.add(third.scores(q_BMD), third)
    for one, part in zip(alone, parts, strict=True):
        torch.testing.assert_close(part.result(), one, rtol=1e-5, atol=1e-6)


def test_blocks_give_the_softmax_over_all_keys():
    torch.manual_seed(1)
    q_BMD, kv_2BND = torch.randn(2, 5, 16), torch.randn(2, 2, 21, 16)
    state = state_of(q_BMD, [PlainBlock(kv_2BND[:, :, start : start + 7]) for start in (0, 7, 14)])
    whole = torch.softmax(q_BMD @ kv_2BND[0].mT, -1) @ kv_2BND[1]
    torch.testing.assert_close(state.result(), whole, rtol=1e-5, atol=1e-6)
