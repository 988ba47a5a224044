"""The GDN decode kernel: equal to the plain operations for any rows, states where they belong, repeatable."""

import pytest
import torch

from kakera.arch.blocks import GdnSpec
from kakera.model.weights import GdnWeights
from kakera.ops.gdn_step import StepRows, gdn_step, gdn_step_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
MODELS = {"27B": (16, 48), "reference": (4, 12), "equal heads": (4, 4)}


def layer(k_heads: int, v_heads: int, dtype: torch.dtype, slots: int, state_dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    spec = GdnSpec(k_heads, v_heads, 128, 128, 4)
    make = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    weights = GdnWeights(
        proj_in=None,
        proj_out=None,
        conv_KC=make(4, spec.conv_channels) * 0.5,
        rate_V=-make(v_heads).exp(),
        dt_bias_V=make(v_heads),
        scale_D=make(128),
    )
    state = (make(slots, v_heads, 128, 128) * 0.1).to(state_dtype)
    return spec, weights, state, make(slots, 3, spec.conv_channels).to(dtype)


def rows_of(counts, slots, commits, spec) -> StepRows:
    int32 = {"dtype": torch.int32, "device": "cuda"}
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], **int32)
    arrived = torch.zeros(len(counts), spec.k_heads, **int32)
    return StepRows(offsets, torch.tensor(slots, **int32), torch.tensor(commits, **int32), arrived)


def mixed_rows(spec: GdnSpec, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """A view of longer rows, as coded projections give it; gates of all sizes."""
    width = spec.conv_channels + spec.v_heads * (128 + 2)
    return (torch.randn(tokens, width + 24, device="cuda") * 2).to(dtype)[:, :width]


def check(counts, slots, commits, heads, dtype, state_dtype, tolerance) -> None:
    spec, weights, state, columns = layer(*heads, dtype, 9, state_dtype)
    rows, mixed = rows_of(counts, slots, commits, spec), mixed_rows(spec, sum(counts), dtype)
    mine = [x.clone() for x in (state, columns)]
    y = gdn_step(mixed, weights, spec, 1e-6, rows, *mine)
    expected = gdn_step_reference(mixed, weights, spec, 1e-6, rows, state, columns)
    scale = expected.float().abs().max()
    assert (y.float() - expected.float()).abs().max() <= tolerance * scale
    torch.testing.assert_close(mine[0], state, rtol=1e-2 if state_dtype == torch.float16 else 1e-4, atol=1e-4)
    assert torch.equal(mine[1], columns)
    assert not rows.arrived.any()


@pytest.mark.parametrize("heads", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8])
def test_one_token_a_row(heads, dtype, rows):
    slots = [7, 0, 3, 8, 1, 2, 5, 4][:rows]
    check([1] * rows, slots, [1] * rows, heads, dtype, torch.float32, 2**-7)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_several_tokens_and_states_behind_some_of_them(state_dtype):
    check([3, 1, 8, 0, 4, 2], [4, 0, 8, 1, 6, 2], [3, 1, 5, 0, 0, 1], (16, 48), torch.bfloat16, state_dtype, 2**-6)


def test_tokens_handed_in_again_give_what_they_gave_at_once():
    """Speculation: four tokens without a trace, then the two that stay, then two others behind them."""
    spec, weights, state, columns = layer(4, 12, torch.bfloat16, 2)
    mixed = mixed_rows(spec, 4, torch.bfloat16)
    step = lambda x, commits, s, c: gdn_step(x, weights, spec, 1e-6, rows_of([len(x)], [1], [commits], spec), s, c)  # noqa: E731
    before = [x.clone() for x in (state, columns)]
    whole = step(mixed, 0, state, columns)
    assert torch.equal(state, before[0]) and torch.equal(columns, before[1])
    again = step(mixed, 2, state, columns)
    assert torch.equal(again, whole)
    assert torch.equal(step(mixed[2:], 2, state, columns), whole[2:])
    one_by_one = torch.cat([step(mixed[i : i + 1], 1, *before) for i in range(4)])
    assert torch.equal(one_by_one, whole)
    assert torch.equal(before[0], state) and torch.equal(before[1], columns)
