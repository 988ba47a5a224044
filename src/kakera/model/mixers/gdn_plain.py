"""Gated DeltaNet between its projections in plain operations: the reference of `gdn_kernels`, and what a CPU computes.

Decode spans go through the recurrent step, those of one token together, longer ones token by token with the same bits;
prefill spans through the chunk form one by one, cut inside the layer where a checkpoint is wanted. The cut costs no
arithmetic: the chunk form carries the state past it anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.blocks import GdnSpec
from kakera.kv.batch import Batch, Kept, Span
from kakera.model.state import StatePool, save_layer
from kakera.model.weights import GdnWeights
from kakera.ops.activation import sigmoid, silu, softplus
from kakera.ops.conv import causal_conv, causal_conv_step, conv_tail
from kakera.ops.gated_delta import gated_delta_step
from kakera.ops.gated_delta_chunk import gated_delta_chunk
from kakera.ops.norm import l2_norm, rms_norm_gated


@dataclass(frozen=True)
class PlainCore:
    spec: GdnSpec
    eps: float
    capturable = False

    def plan(self, batch: Batch, states: StatePool) -> PlainPass:
        steps = tuple(span for span in batch.decode if span.count == 1 and span.held is None)
        return PlainPass(
            spec=self.spec,
            eps=self.eps,
            states=states,
            steps=steps,
            step_rows=_rows_of([span.offset for span in steps], batch.device),
            slots=torch.tensor([span.slot for span in steps], dtype=torch.int64, device=batch.device),
            rows=tuple(span for span in batch.decode if span.count != 1 or span.held is not None),
            scans=batch.prefill,
        )

    def commit(self, layer: int, weights: GdnWeights, kept: Sequence[tuple[Kept, Tensor]], states: StatePool) -> None:
        for each, mixed_NX in kept:
            live = states.state_LSVKD[layer, each.slot], states.conv_LSWC[layer, each.slot]
            if each.held.ends and each.whole:
                for part, end in zip(live, each.held.ends[layer], strict=True):
                    part.copy_(end)
                continue
            _advance(self.spec, weights, _projected(self.spec, weights, mixed_NX)[0], *live)


def _rows_of(rows: list[int], device: torch.device) -> slice | Tensor:
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class _Projected:
    """What the projections give for every row: qkv before the convolution, and the gates in float32."""

    qkv_TC: Tensor
    g_TV: Tensor  # log of the decay, <= 0
    beta_TV: Tensor

    def rows(self, which: slice | Tensor) -> _Projected:
        return _Projected(self.qkv_TC[which], self.g_TV[which], self.beta_TV[which])


@dataclass(frozen=True)
class PlainPass:
    """How the spans of a batch go through every layer: `steps` of one token each together, `rows` of several, or held,
    one by one, `scans` in chunks."""

    spec: GdnSpec
    eps: float
    states: StatePool
    steps: tuple[Span, ...]
    step_rows: slice | Tensor  # a slice, if they lie together, costs no copies
    slots: Tensor
    rows: tuple[Span, ...]
    scans: tuple[Span, ...]

    def run(self, layer: int, weights: GdnWeights, mixed_TX: Tensor) -> Tensor:
        V, D = self.spec.v_heads, self.spec.v_dim
        projected, z = _projected(self.spec, weights, mixed_TX)
        o_TVD = mixed_TX.new_empty(mixed_TX.shape[0], V, D, dtype=torch.float32)
        if self.steps:
            o_TVD[self.step_rows] = self._step(weights, projected.rows(self.step_rows), layer)
        for span in self.rows:
            o_TVD[span.rows] = self._row(weights, projected.rows(span.rows), layer, span)
        for span in self.scans:
            o_TVD[span.rows] = self._scan(weights, projected.rows(span.rows), layer, span)
        y_TVD = rms_norm_gated(o_TVD, torch.unflatten(z, 1, (V, D)), weights.scale_D, self.eps)
        return y_TVD.flatten(1)

    def _step(self, weights: GdnWeights, rows: _Projected, layer: int) -> Tensor:
        """One token of each single-token span, [B, V, D]."""
        state_SVKD, conv_SWC = self.states.state_LSVKD[layer], self.states.conv_LSWC[layer]
        before_BWC = conv_SWC.index_select(0, self.slots)
        q, k, v = _heads(self.spec, causal_conv_step(rows.qkv_TC.float(), before_BWC.float(), weights.conv_KC))
        after_BWC = torch.cat([before_BWC[:, 1:], rows.qkv_TC[:, None].to(before_BWC.dtype)], dim=1)
        conv_SWC.index_copy_(0, self.slots, after_BWC)
        slots = [span.slot for span in self.steps]
        o_BVD = gated_delta_step(q, k, v, rows.g_TV, rows.beta_TV, state_SVKD, slots)
        for span in self.steps:
            for save in span.saves:
                save_layer(save.into, layer, state_SVKD[span.slot], conv_SWC[span.slot])
        return o_BVD

    def _row(self, weights: GdnWeights, rows: _Projected, layer: int, span: Span) -> Tensor:
        """The tokens of one decode span, [N, V, D]. The states of a held one stay as they are."""
        live = self.states.state_LSVKD[layer, span.slot], self.states.conv_LSWC[layer, span.slot]
        if span.held is not None:
            live = live[0].clone(), live[1].clone()
        outputs: list[Tensor] = []
        for part, saves in span.parts():
            outputs.append(_advance(self.spec, weights, rows.rows(part), *live))
            for save in saves:
                save_layer(save.into, layer, *live)
        if span.held is not None and span.held.ends is not None:
            span.held.ends.append(live)
        return torch.cat(outputs)

    def _scan(self, weights: GdnWeights, rows: _Projected, layer: int, span: Span) -> Tensor:
        """All tokens of one span, [N, V, D]."""
        states = self.states
        state_VKD, before_WC = states.state_LSVKD[layer, span.slot], states.conv_LSWC[layer, span.slot]
        q, k, v = _heads(self.spec, causal_conv(rows.qkv_TC.float(), before_WC, weights.conv_KC))
        outputs: list[Tensor] = []
        carried = state_VKD
        for part, saves in span.parts():
            output, carried = gated_delta_chunk(q[part], k[part], v[part], rows.g_TV[part], rows.beta_TV[part], carried)
            outputs.append(output)
            for save in saves:
                save_layer(save.into, layer, carried, conv_tail(rows.qkv_TC[: part.stop], before_WC))
        state_VKD.copy_(carried)
        before_WC.copy_(conv_tail(rows.qkv_TC, before_WC))
        return torch.cat(outputs)


def _projected(spec: GdnSpec, weights: GdnWeights, mixed_TX: Tensor) -> tuple[_Projected, Tensor]:
    """And z, the gate of the output."""
    values, heads = spec.v_heads * spec.v_dim, spec.v_heads
    qkv_TC, z_TI, b_TV, a_TV = torch.split(mixed_TX, [spec.conv_channels, values, heads, heads], dim=1)
    g_TV = softplus(a_TV.float() + weights.dt_bias_V).mul_(weights.rate_V)
    return _Projected(qkv_TC, g_TV, sigmoid(b_TV)), z_TI


def _advance(spec: GdnSpec, weights: GdnWeights, rows: _Projected, state_VKD: Tensor, columns_WC: Tensor) -> Tensor:
    """Tokens of one sequence, [N, V, D]; state and columns are updated in place: with the bits of one token a step."""
    count, width = len(rows.qkv_TC), len(columns_WC)
    all_WC = torch.cat([columns_WC, rows.qkv_TC.to(columns_WC.dtype)])
    before_NWC = torch.stack([all_WC[n : n + width] for n in range(count)])
    q, k, v = _heads(spec, causal_conv_step(rows.qkv_TC.float(), before_NWC.float(), weights.conv_KC))
    state_1VKD, ones = state_VKD[None], [slice(n, n + 1) for n in range(count)]
    outputs = [gated_delta_step(q[n], k[n], v[n], rows.g_TV[n], rows.beta_TV[n], state_1VKD, [0]) for n in ones]
    columns_WC.copy_(all_WC[count:])
    return torch.cat(outputs)


def _heads(spec: GdnSpec, conv_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU, then q [N, J, K] and k [N, J, K], normalised and q scaled, and v [N, V, D]."""
    qk, v = torch.split(silu(conv_NC), [2 * spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim], dim=1)
    q_NJK, k_NJK = l2_norm(qk.view(-1, 2, spec.k_heads, spec.k_dim)).unbind(1)
    return q_NJK * spec.k_dim**-0.5, k_NJK, torch.unflatten(v, 1, (spec.v_heads, spec.v_dim))
