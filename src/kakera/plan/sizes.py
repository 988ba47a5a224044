"""Bytes of everything that is neither weights nor KV pages, by formula. No torch.

Nothing in this file depends on the length of the context: that is promise 2 of the planner.
Results are bytes on the device that holds `spec`: where several share a model, that of one rank (`arch/shard.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kakera.arch.blocks import AttentionSpec, Block, GdnSpec
from kakera.arch.layout import DTYPE_BYTES, Dtype, Dtypes, Record, checkpoint_record, record_bytes, slot_record
from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.plan import gdn_plan
from kakera.plan.kv_format import KvFormat
from kakera.plan.plan import StateDtype
from kakera.plan.prefill_plan import PrefillPlan

MIB = 2**20
SAMPLER_COPIES = 3  # logits, the same with penalties and masks, what is ranked of them at a time
HEAD_PIECE_ROWS = 64  # most rows through lm_head at once (echo with log-probabilities): 64 MB of the 27B's logits
HISTORY_TOKENS = 1024  # INT2 history that attention restores at a time on a CPU
MOST_MULTIPROCESSORS = 170  # of an RTX 5090; fewer need less scratch
SCORE_KEYS = 512  # keys that the plain path scores at once, for one query page
STAGED_CHECKPOINTS = 2  # a step rarely saves more: end of a message and the end of the prompt
DECODED_BYTES = 192 * MIB  # 16-bit weights decoded at a time on a GPU: the widest matrix of the 27B whole, 178 MB
CODED_ROWS_BYTES = 16 * MIB  # partial sums and rotated inputs of products with coded weights: 14 MB for the 27B
GAP_LEAST, GAP_SHARE = 64 * MIB, 0.3  # of the memory of a step, see gap_bytes
KERNEL_HEAD_DIMS, KERNEL_GROUPS = (128, 256), 4  # of attention kernels: sizes of a head, most groups of it
GDN_RANGE_TOKENS = 2048  # longest range that the chunk form holds temporaries for


@dataclass(frozen=True)
class Overhead:
    """A stated estimate of what the runtime takes beyond our tensors. `kakera.plan` marks it as an estimate."""

    name: str
    bytes: int
    note: str


# Measured on an H200 with torch 2.11: 680 MB with graphs of 8 rows, 806 MB with chunks of 8,192. A card with fewer
# multiprocessors keeps less local memory for each, so this is on the safe side there.
CUDA_OVERHEADS = (
    Overhead("CUDA context and modules", 640 * MIB, "estimate"),
    Overhead("CUDA graphs", 128 * MIB, "estimate"),
)
NCCL_OVERHEAD = Overhead("NCCL buffers", 160 * MIB, "estimate, several cards only")
# Resident sets measured on Linux, torch 2.13 CPU: engine process 235 MB before the weights, server 80 MB with a
# 16K-token vocabulary, its helpers 13 MB; a 248K-token vocabulary and allocator slack take the rest.
CPU_OVERHEADS = (Overhead("server and engine processes", 640 * MIB, "estimate: Python, torch, tokenizer"),)
# Guesses as well: a CUDA build of torch loads far larger libraries than the CPU build.
CUDA_HOST_BYTES = 1280 * MIB
SERVER_HOST_BYTES = 320 * MIB

# A 12 GB card spills to the host above 11,830 of 12,227 MiB and already slows down at that line: keep 4 % free.
MARGIN_SHARE, MARGIN_LEAST = 0.04, 384 * MIB


def margin(capacity: int) -> int:
    """Bytes of a device or of the host that stay free."""
    return max(int(capacity * MARGIN_SHARE), MARGIN_LEAST)


def activation_dtype(device: str) -> Dtype:
    """fp32 on a CPU (16-bit matmul is slower there), 16 bit on a GPU."""
    return "fp32" if device == "cpu" else "bf16"


def activation_bytes(device: str) -> int:
    return DTYPE_BYTES[activation_dtype(device)]


def live_state_bytes(spec: ModelSpec, device: str) -> int:
    """GDN states (fp32) and convolution columns (as activations) of one running request."""
    return record_bytes(slot_record(spec, activation_dtype(device)))


def checkpoint_parts(spec: ModelSpec, kv: KvFormat, state_dtype: StateDtype, device: str) -> Record:
    """One checkpoint: states, conv columns, the window's pages, the last hidden."""
    return checkpoint_record(spec, kv.checkpoint_pages, Dtypes(state_dtype, activation_dtype(device)))


def checkpoint_bytes(spec: ModelSpec, kv: KvFormat, state_dtype: StateDtype, device: str) -> int:
    return record_bytes(checkpoint_parts(spec, kv, state_dtype, device))


def attends_plainly(spec: ModelSpec, kv: KvFormat, rotation: str | None) -> bool:
    """Whether a GPU has no attention kernels for this and takes float32 operations of torch: `can_attend` of
    kv/gpu/backend.py in the words of a plan, where a rotation file counts as one that turns."""
    quarter_turns = spec.rotary_dim * 4 in (spec.head_dim, 2 * spec.head_dim, 4 * spec.head_dim)
    groups = spec.head_dim // kv.group if kv.windowed else 1
    sizes = spec.head_dim in KERNEL_HEAD_DIMS and quarter_turns and groups <= KERNEL_GROUPS
    return rotation is not None or kv.codec == "fp32" or not sizes


def scratch_bytes(spec: ModelSpec, kv: KvFormat, chunk: int, slots: int, device: str, plain: bool = False) -> int:
    """Activations and scratch of one step: `chunk` prefill tokens and `slots` decode rows, whatever the context.
    `plain`: see `attends_plainly`, for a GPU.

    The residual stream lives all the time; of the blocks only one is alive at once. The head comes after the layers. On
    a GPU come the pieces of 16-bit weights that long prefill decodes, and sums of the short products.
    """
    tokens = chunk + slots
    item = activation_bytes(device)
    residual = 3 * tokens * spec.hidden * spec.residual.streams * item
    layer = max(_block_scratch(block, kv, tokens, item, device, plain) for block in spec.distinct)
    head = SAMPLER_COPIES * max(slots, min(chunk, HEAD_PIECE_ROWS)) * spec.vocab * 4
    if device == "cpu":
        return residual + max(layer, head)
    return residual + max(layer, head) + _held(spec, kv, chunk, slots, plain)


def _block_scratch(block: Block, kv: KvFormat, tokens: int, item: int, device: str, plain: bool) -> int:
    if isinstance(block, GdnSpec):
        return _gdn_scratch(block, tokens, item, device)
    if isinstance(block, AttentionSpec):
        attention = _plain_scratch if plain and device != "cpu" else _attention_scratch
        return attention(block, kv, tokens, item, device)
    return tokens * block.alive * item


def _held(spec: ModelSpec, kv: KvFormat, chunk: int, slots: int, plain: bool) -> int:
    """What a GPU holds between steps."""
    attention = 0 if plain else held_attention_bytes(spec, kv, chunk, slots)
    return decoded_bytes(spec) + CODED_ROWS_BYTES + attention


def gap_bytes(spec: ModelSpec, kv: KvFormat, chunk: int, slots: int, device: str, plain: bool = False) -> int:
    """What torch's allocator keeps beside the tensors of a step, because they come and go in different sizes: measured
    a third of them, 0.40 of 1.15 GB at a chunk of 8,192 tokens and 0.16 of 0.27 at 2,048."""
    held = _held(spec, kv, chunk, slots, plain)
    return GAP_LEAST + int(GAP_SHARE * (scratch_bytes(spec, kv, chunk, slots, device, plain) - held))


def held_attention_bytes(spec: ModelSpec, kv: KvFormat, chunk: int, slots: int) -> int:
    """What the attention kernels of a GPU hold from the start: unpacked history, sums, the 16-bit band of a segment,
    and what the thread blocks of decode leave (8 columns of float32 each)."""
    plan = _prefill_plan(spec.attention, kv, chunk)
    band = (chunk + kv.window_pages * PAGE) * 2 * plan.kv_heads * spec.head_dim * 2 if kv.windowed else 0
    left = MOST_MULTIPROCESSORS + slots * spec.group * plan.kv_heads
    return plan.scratch_bytes + band + left * 8 * (spec.head_dim + 2) * 4


def _prefill_plan(own: AttentionSpec, kv: KvFormat, chunk: int) -> PrefillPlan:
    window = kv.window_pages if kv.windowed else 0
    return PrefillPlan(own.heads, own.kv_heads, own.head_dim, window, chunk, MOST_MULTIPROCESSORS)


def decoded_bytes(spec: ModelSpec) -> int:
    """16-bit weights that long prefill decodes at a time on a GPU: the widest matrix of an MLP, or a piece of it."""
    mixers = (AttentionSpec, GdnSpec)  # whose matrices are decoded in pieces if they are wider
    tensors = [t for b in spec.distinct if not isinstance(b, mixers) for t in b.tensors(spec.hidden)]
    matrices = [t.shape[-2] * t.shape[-1] for t in tensors if t.kind is not None]
    return min(DECODED_BYTES, 2 * max(matrices, default=0))


def _attention_scratch(own: AttentionSpec, kv: KvFormat, tokens: int, item: int, device: str) -> int:
    """Projections, and the softmax accumulators, the band of 16-bit keys and one restored piece of the history; on a
    GPU what comes beside the scratch that is held: rotated queries, outputs, and what the library allocates."""
    width, kv_width = own.heads * own.head_dim, own.kv_heads * own.head_dim
    projected = tokens * own.alive * item
    if device != "cpu":
        return projected + 3 * tokens * width * item + _prefill_plan(own, kv, tokens).transient_bytes
    accumulators = 2 * tokens * width * 4  # two partial outputs that are merged by log-sum-exp
    band = 2 * (tokens + kv.window_pages * PAGE) * kv_width * item
    history = 2 * HISTORY_TOKENS * kv_width * item if kv.windowed else 0
    # the plain path materialises scores and probabilities of one query page
    scores = 2 * own.heads * PAGE * SCORE_KEYS * 4
    return projected + accumulators + band + history + scores


def _plain_scratch(own: AttentionSpec, kv: KvFormat, tokens: int, item: int, device: str) -> int:
    """A GPU without attention kernels: in float32 the scaled queries and the output, queries by pages and all of them
    in a row, softmax sums by page and joined, what a piece adds, the result; the scores of a piece; the band twice."""
    width, kv_width = own.heads * own.head_dim, own.kv_heads * own.head_dim
    queries = 8 * tokens * width * 4
    scores = own.heads * tokens * SCORE_KEYS * 4
    band = 2 * 2 * (tokens + kv.window_pages * PAGE) * kv_width * 4
    history = 2 * HISTORY_TOKENS * kv_width * 4
    return tokens * own.alive * item + queries + scores + band + history


def _gdn_scratch(gdn: GdnSpec, tokens: int, item: int, device: str) -> int:
    """Projections of the whole step; on a CPU float32 temporaries of the chunk form for a bounded range of it, on a GPU
    what the kernels hold for one, and their output."""
    if device != "cpu":
        projected = tokens * (gdn.conv_channels + 2 * gdn.values + 2 * gdn.v_heads) * item
        return projected + gdn_plan.scratch_bytes(gdn, tokens)
    projected = tokens * (2 * gdn.conv_channels + 3 * gdn.values) * item
    # per value head and token: q, k, beta k, Wk; v, U, V', O; rows of A, (I + A)^-1, D, Q K^T; 1/64 of a state
    row = 4 * gdn.k_dim + 4 * gdn.v_dim + 4 * 64 + gdn.k_dim * gdn.v_dim // 64
    return projected + min(tokens, GDN_RANGE_TOKENS) * gdn.v_heads * row * 4
