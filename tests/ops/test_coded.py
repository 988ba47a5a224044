"""CodedLinear: what can be done with a coded linear without decoding it, and its int8 neighbour's look-up."""

from __future__ import annotations

import torch

from kakera.ops.codec.coded import CodedLinear
from kakera.ops.int8 import int8_rows, int8_weight


def test_blocks_of_output_channels_can_be_reordered_without_decoding():
    made = torch.Generator().manual_seed(3)
    code = torch.randint(-(1 << 15), 1 << 15, (8, 32, 32), dtype=torch.int16, generator=made)
    linear = CodedLinear(code, torch.rand(128, generator=made), torch.rand(512, generator=made), "mcg")
    chosen = linear.blocks(torch.tensor([3, 0]))
    rows = linear.weight().view(4, 128, 128)
    assert chosen.out_channels == 256
    torch.testing.assert_close(chosen.weight(), torch.cat([rows[3], rows[0]]), rtol=0, atol=0)


def test_a_row_of_an_int8_table_is_a_row_of_its_decoded_form():
    made = torch.Generator().manual_seed(4)
    q = torch.randint(-127, 128, (50, 24), generator=made).to(torch.int8)
    scale = (torch.rand(50, generator=made) * 0.01).half()
    tokens = torch.tensor([7, 0, 49, 7])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(int8_rows(q, scale, tokens, dtype), int8_weight(q, scale, dtype)[tokens])
