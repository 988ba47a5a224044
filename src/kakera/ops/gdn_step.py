"""A Gated DeltaNet layer between its projections for decode rows, in one launch on a GPU.

Reference: `gdn_step_reference`, the plain operations of `kakera.model.mixers.gdn_plain` token by token.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kakera.arch.blocks import GdnSpec
from kakera.ops.activation import sigmoid, silu, softplus
from kakera.ops.conv import causal_conv
from kakera.ops.cuda.compiler import kernel
from kakera.ops.gated_delta import gated_delta_recurrent
from kakera.ops.norm import l2_norm, rms_norm_gated
from kakera.target.as_torch import name_of
from kakera.target.kernels import serves_gdn_step

THREADS = 512  # of a block of gdn_step.cu


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mixed", "conv", "rate", "bias", "scale", "state", "columns")),
        *((name, ctypes.c_void_p) for name in ("offsets", "slots", "commits", "arrived", "y")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("row_stride", "key_heads", "pad")),
    ]


class GdnConstants(Protocol):
    """What a layer has beside its projections. All float32."""

    @property
    def conv_KC(self) -> Tensor: ...  # [taps, channels]
    @property
    def rate_V(self) -> Tensor: ...  # the log of the decay is rate softplus(a + dt_bias)
    @property
    def dt_bias_V(self) -> Tensor: ...
    @property
    def scale_D(self) -> Tensor: ...  # of the gated norm


@dataclass(frozen=True)
class StepRows:
    """Decode rows, int32 on the device: row r has the tokens offsets[r] .. offsets[r + 1] - 1 and lives in slots_R[r].

    commits_R: behind how many of its tokens the slot's state is stored; the others leave no trace. arrived: zeros
    [rows, key heads], and zeros again after each launch.
    """

    offsets: Tensor
    slots_R: Tensor
    commits_R: Tensor
    arrived: Tensor


def gdn_step(
    mixed_TX: Tensor,
    constants: GdnConstants,
    spec: GdnSpec,
    eps: float,
    rows: StepRows,
    state_SVKD: Tensor,
    conv_SWC: Tensor,
) -> Tensor:
    """y_TI [T, v_heads * v_dim] in the dtype of mixed_TX, which holds q | k | v | z | b | a, channels contiguous.

    Updates state_SVKD (float32 or float16 [slots, V, K, D]) and conv_SWC (the activations' dtype, [slots, taps - 1,
    channels]) in place; no slot may stand in two rows. Raises ValueError.
    """
    if not serves_gdn_step(spec, name_of(mixed_TX.dtype)) or conv_SWC.dtype != mixed_TX.dtype:
        raise ValueError(f"no kernel steps {spec} with {mixed_TX.dtype} activations and {conv_SWC.dtype} columns")
    if not (state_SVKD.is_contiguous() and conv_SWC.is_contiguous()) or state_SVKD.dtype == torch.bfloat16:
        raise ValueError(f"states and columns must be contiguous, states float32 or float16, not {state_SVKD.dtype}")
    y_TI = mixed_TX.new_empty(len(mixed_TX), spec.v_heads * spec.v_dim)
    launch = _Launch(
        mixed=mixed_TX.data_ptr(),
        conv=constants.conv_KC.data_ptr(),
        rate=constants.rate_V.data_ptr(),
        bias=constants.dt_bias_V.data_ptr(),
        scale=constants.scale_D.data_ptr(),
        state=state_SVKD.data_ptr(),
        columns=conv_SWC.data_ptr(),
        offsets=rows.offsets.data_ptr(),
        slots=rows.slots_R.data_ptr(),
        commits=rows.commits_R.data_ptr(),
        arrived=rows.arrived.data_ptr(),
        y=y_TI.data_ptr(),
        eps=eps,
        row_stride=mixed_TX.stride(0),
        key_heads=spec.k_heads,
    )
    defines = [f"GROUP={spec.v_heads // spec.k_heads}"]
    defines += ["BF16"] if mixed_TX.dtype == torch.bfloat16 else []
    defines += ["STATE16"] if state_SVKD.dtype == torch.float16 else []
    run = kernel("gdn_step", THREADS, tuple(defines), mixed_TX.device.index)
    run.launch((spec.v_heads, len(rows.slots_R)), launch, dependent=True)
    return y_TI


def gdn_step_reference(
    mixed_TX: Tensor,
    constants: GdnConstants,
    spec: GdnSpec,
    eps: float,
    rows: StepRows,
    state_SVKD: Tensor,
    conv_SWC: Tensor,
) -> Tensor:
    """The same row by row in float32."""
    V, D, channels = spec.v_heads, spec.v_dim, spec.conv_channels
    y_TI = mixed_TX.new_empty(len(mixed_TX), V * D)
    ranges = zip(rows.offsets.tolist(), rows.offsets.tolist()[1:], strict=False)
    for (begin, end), slot, commit in zip(ranges, rows.slots_R.tolist(), rows.commits_R.tolist(), strict=True):
        qkv_NC, z_NI, b_NV, a_NV = torch.split(mixed_TX[begin:end], [channels, V * D, V, V], dim=1)
        columns = torch.cat((conv_SWC[slot], qkv_NC))
        heads = silu(causal_conv(qkv_NC.float(), conv_SWC[slot].float(), constants.conv_KC))
        qk, v_NI = torch.split(heads, [2 * spec.k_heads * spec.k_dim, V * D], dim=1)
        q_NJK, k_NJK = l2_norm(qk.view(-1, 2, spec.k_heads, spec.k_dim)).unbind(1)
        g_NV = softplus(a_NV.float() + constants.dt_bias_V) * constants.rate_V
        state_VKD, outputs = state_SVKD[slot].float(), []
        for n in range(end - begin):
            one = slice(n, n + 1)
            token = q_NJK[one] * spec.k_dim**-0.5, k_NJK[one], v_NI[one].view(1, V, D), g_NV[one], sigmoid(b_NV[one])
            output, state_VKD = gated_delta_recurrent(*token, state_VKD)
            outputs.append(output)
            if n + 1 == commit:
                state_SVKD[slot] = state_VKD
                conv_SWC[slot] = columns[n + 1 : n + spec.conv_taps]
        if outputs:
            gate_NVD = z_NI.reshape(-1, V, D)
            y_TI[begin:end] = rms_norm_gated(torch.cat(outputs), gate_NVD, constants.scale_D, eps).flatten(1)
    return y_TI
