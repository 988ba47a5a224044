"""How a pass goes through Gated DeltaNet on a GPU: decode rows in one launch a layer, prefill spans one by one.

Reference: the plain operations of `kakera.model.gdn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kakera.model.batch import Batch, Span
from kakera.model.state import StatePool, save_layer
from kakera.model.weights import GdnWeights
from kakera.ops.gdn_step import StepRows, can_step, gdn_step
from kakera.plan.spec import GdnSpec


@dataclass(frozen=True)
class KernelRoutes:
    """The spans of a pass. `rows`: those of `decode`, or None; `fast_rows`: their tokens, as in `linear`."""

    spec: GdnSpec
    eps: float
    decode: tuple[Span, ...]
    rows: StepRows | None
    fast_rows: int
    prefill: tuple[Span, ...]

    @staticmethod
    def of(batch: Batch, spec: GdnSpec, eps: float) -> KernelRoutes:
        rows = _step_rows(batch, spec) if batch.decode else None
        return KernelRoutes(spec, eps, batch.decode, rows, batch.decode_rows, batch.prefill)

    def __call__(self, weights: GdnWeights, mixed_TX: Tensor, layer: int, states: StatePool) -> Tensor:
        """All between the projections, [T, V D]. Updates `states` and fills the spans' saves."""
        state_SVKD, conv_SWC = states.state_LSVKD[layer], states.conv_LSWC[layer]
        outputs: list[Tensor] = []
        if self.rows is not None:
            mixed_RX = mixed_TX[: self.fast_rows]
            outputs.append(gdn_step(mixed_RX, weights, self.spec, self.eps, self.rows, state_SVKD, conv_SWC))
            for span in self.decode:
                for save in span.saves:
                    save_layer(save.into, layer, state_SVKD[span.slot], conv_SWC[span.slot])
        for span in self.prefill:
            outputs.append(self._prefill(weights, mixed_TX[span.rows], layer, span, state_SVKD, conv_SWC))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _prefill(
        self, weights: GdnWeights, mixed_NX: Tensor, layer: int, span: Span, state_SVKD: Tensor, conv_SWC: Tensor
    ) -> Tensor:
        from kakera.ops.gdn_prefill import StateSave, gdn_prefill  # Triton comes with CUDA builds of torch only

        saves = [
            StateSave(save.position - span.start, save.into.state_LVKD[layer], save.into.conv_LCW[layer])
            for save in span.saves
            if save.into.state_LVKD is not None and save.into.conv_LCW is not None
        ]
        live = state_SVKD[span.slot], conv_SWC[span.slot]
        return gdn_prefill(mixed_NX, weights, self.spec, self.eps, *live, saves)


def takes(batch: Batch, spec: GdnSpec, dtype: torch.dtype) -> bool:
    """Whether kernels compute a pass with activations of `dtype`."""
    return batch.device.type == "cuda" and can_step(spec, dtype)


def _step_rows(batch: Batch, spec: GdnSpec) -> StepRows:
    """Every token of a decode span stays, so each row stores its state behind its last."""
    device, rows = batch.device, len(batch.decode)
    arrived = torch.zeros(rows, spec.k_heads, dtype=torch.int32, device=device)
    if batch.singles is not None:  # in operations of the device alone, so that a graph can capture them
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
        ones_R = torch.ones(rows, dtype=torch.int32, device=device)
        return StepRows(offsets, batch.singles.slots_R.int(), ones_R, arrived)
    counts = [span.count for span in batch.decode]
    slots = [span.slot for span in batch.decode]
    slots_R, counts_R = torch.tensor([slots, counts], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    return StepRows(offsets, slots_R, counts_R, arrived)
