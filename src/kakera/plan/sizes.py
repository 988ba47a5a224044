"""Bytes of everything that is neither weights nor KV pages, by formula. No torch.

Nothing in this file depends on the length of the context: that is promise 2 of the planner.
Results are bytes on the device that holds `spec`: where several share a model, that of one rank (`arch/shard.py`).
"""

from __future__ import annotations

from kakera.arch.blocks import AttentionSpec, Block, GdnSpec
from kakera.arch.layout import Dtypes, Record, checkpoint_record, record_bytes, slot_record
from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.plan import gdn_plan
from kakera.plan.kv_format import KvFormat
from kakera.plan.plan import MOST_DRAFTS, Plan, total_on
from kakera.plan.prefill_plan import PrefillPlan
from kakera.target.devices import Device, Machine
from kakera.target.target import MIB, StateDtype, Target

SAMPLER_COPIES = 3  # logits, the same with penalties and masks, what is ranked of them at a time
HEAD_PIECE_ROWS = 64  # most rows through lm_head at once (echo with log-probabilities): 64 MB of the 27B's logits
HISTORY_TOKENS = 1024  # INT2 history that attention restores at a time on a CPU
MOST_MULTIPROCESSORS = 170  # of an RTX 5090; fewer need less scratch
SCORE_KEYS = 512  # keys that the plain path scores at once, for one query page
DECODED_BYTES = 192 * MIB  # 16-bit weights decoded at a time on a GPU: the widest matrix of the 27B whole, 178 MB
CODED_ROWS_BYTES = 16 * MIB  # partial sums and rotated inputs of products with coded weights: 14 MB for the 27B
GAP_LEAST, GAP_SHARE = 64 * MIB, 0.3  # of the memory of a step, see gap_bytes
EXCHANGE_ROWS, EXCHANGE_LOGITS, EXCHANGE_PIECE_BYTES = 64, 32, 16 * MIB  # through kernels; a step's; by copies
GDN_RANGE_TOKENS = 2048  # longest range that the chunk form holds temporaries for

# A 12 GB card spills to the host above 11,830 of 12,227 MiB and already slows down at that line: keep 4 % free.
MARGIN_SHARE, MARGIN_LEAST = 0.04, 384 * MIB


def margin(capacity: int) -> int:
    """Bytes of a device or of the host that stay free."""
    return max(int(capacity * MARGIN_SHARE), MARGIN_LEAST)


def left_over(plan: Plan, machine: Machine) -> int:
    """Bytes of the device with least room that a plan has no use for, beyond what is kept free. Negative: too few."""
    host = plan.total("host") if plan.target.one_memory else 0
    cards = enumerate(machine.devices[: len(plan.device_bytes)])
    return min(usable(card, plan.reserve) - total_on(plan.rows, "device", i) for i, card in cards) - host


def usable(device: Device, reserve: int) -> int:
    """Bytes that a plan may take."""
    return device.bytes - device.used - margin(device.bytes) - reserve


def live_state_bytes(spec: ModelSpec, target: Target) -> int:
    """GDN states (fp32) and convolution columns (as activations) of one running request."""
    return record_bytes(slot_record(spec, target.dtype))


def drafted_bytes(spec: ModelSpec, slots: int, target: Target) -> int:
    """What a step with drafts holds until it is known which of them stay, the states behind all of one row's, and the
    hidden states that a draft layer has not seen yet."""
    waiting = slots * PAGE * spec.draft.width if spec.drafting and spec.draft is not None else 0
    given = 0
    if (gdn := spec.gdn) is not None:
        given = len(spec.gdn_layers) * (gdn.conv_channels + gdn.values + 2 * gdn.v_heads)
    return (waiting + (slots + MOST_DRAFTS) * given) * target.activation_bytes + live_state_bytes(spec, target)


def checkpoint_parts(spec: ModelSpec, kv: KvFormat, state_dtype: StateDtype, target: Target) -> Record:
    """One checkpoint: states, conv columns, the window's pages, the last hidden."""
    return checkpoint_record(spec, kv.checkpoint_pages, Dtypes(state_dtype, target.dtype))


def checkpoint_bytes(spec: ModelSpec, kv: KvFormat, state_dtype: StateDtype, target: Target) -> int:
    return record_bytes(checkpoint_parts(spec, kv, state_dtype, target))


def scratch_bytes(spec: ModelSpec, kv: KvFormat, chunk: int, slots: int, target: Target, plain: bool = False) -> int:
    """Activations and scratch of one step: `chunk` prefill tokens and `slots` decode rows, whatever the context.
    `plain`: whether a GPU has no attention kernels for this and takes float32 operations of torch.

    The residual stream lives all the time; of the blocks only one is alive at once. The head comes after the layers. On
    a GPU come the pieces of 16-bit weights that long prefill decodes, and sums of the short products.
    """
    tokens = chunk + slots
    item = target.activation_bytes
    residual = 3 * tokens * spec.hidden * spec.residual.streams * item
    layer = max(_block_scratch(block, kv, tokens, item, target, plain) for block in spec.distinct)
    head = SAMPLER_COPIES * max(slots, min(chunk, HEAD_PIECE_ROWS)) * spec.vocab * 4
    if target.one_memory:
        return residual + max(layer, head)
    return residual + max(layer, head) + _held(spec, kv, chunk, slots, plain)


def _block_scratch(block: Block, kv: KvFormat, tokens: int, item: int, target: Target, plain: bool) -> int:
    if isinstance(block, GdnSpec):
        return _gdn_scratch(block, tokens, item, target)
    if isinstance(block, AttentionSpec):
        attention = _plain_scratch if plain and target.has_cards else _attention_scratch
        return attention(block, kv, tokens, item, target)
    return tokens * block.alive * item


def exchange_bytes(spec: ModelSpec, ranks: int) -> int:
    """Pinned host memory through which cards exchange sums, logits and tokens: of each rank two slots of the widest
    step and a piece of a prefill chunk; the logits of the others."""
    a_rank = 2 * EXCHANGE_ROWS * spec.hidden * 2 + EXCHANGE_PIECE_BYTES
    return ranks * a_rank + EXCHANGE_LOGITS * spec.vocab * 2


def _held(spec: ModelSpec, kv: KvFormat, chunk: int, slots: int, plain: bool) -> int:
    """What a GPU holds between steps."""
    attention = 0 if plain else held_attention_bytes(spec, kv, chunk, slots)
    return decoded_bytes(spec) + CODED_ROWS_BYTES + attention


def gap_bytes(spec: ModelSpec, kv: KvFormat, chunk: int, slots: int, target: Target, plain: bool = False) -> int:
    """What torch's allocator keeps beside the tensors of a step, because they come and go in different sizes: measured
    a third of them, 0.40 of 1.15 GB at a chunk of 8,192 tokens and 0.16 of 0.27 at 2,048."""
    held = _held(spec, kv, chunk, slots, plain)
    return GAP_LEAST + int(GAP_SHARE * (scratch_bytes(spec, kv, chunk, slots, target, plain) - held))


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


def _attention_scratch(own: AttentionSpec, kv: KvFormat, tokens: int, item: int, target: Target) -> int:
    """Projections, and the softmax accumulators, the band of 16-bit keys and one restored piece of the history; on a
    GPU what comes beside the scratch that is held: rotated queries, outputs, and what the library allocates."""
    width, kv_width = own.heads * own.head_dim, own.kv_heads * own.head_dim
    projected = tokens * own.alive * item
    if target.has_cards:
        return projected + 3 * tokens * width * item + _prefill_plan(own, kv, tokens).transient_bytes
    accumulators = 2 * tokens * width * 4  # two partial outputs that are merged by log-sum-exp
    band = 2 * (tokens + kv.window_pages * PAGE) * kv_width * item
    history = 2 * HISTORY_TOKENS * kv_width * item if kv.windowed else 0
    # the plain path materialises scores and probabilities of one query page
    scores = 2 * own.heads * PAGE * SCORE_KEYS * 4
    return projected + accumulators + band + history + scores


def _plain_scratch(own: AttentionSpec, kv: KvFormat, tokens: int, item: int, target: Target) -> int:
    """A GPU without attention kernels: in float32 the scaled queries and the output, queries by pages and all of them
    in a row, softmax sums by page and joined, what a piece adds, the result; the scores of a piece; the band twice."""
    width, kv_width = own.heads * own.head_dim, own.kv_heads * own.head_dim
    queries = 8 * tokens * width * 4
    scores = own.heads * tokens * SCORE_KEYS * 4
    band = 2 * 2 * (tokens + kv.window_pages * PAGE) * kv_width * 4
    history = 2 * HISTORY_TOKENS * kv_width * 4
    return tokens * own.alive * item + queries + scores + band + history


def _gdn_scratch(gdn: GdnSpec, tokens: int, item: int, target: Target) -> int:
    """Projections of the whole step; on a CPU float32 temporaries of the chunk form for a bounded range of it, on a GPU
    what the kernels hold for one, and their output."""
    if target.has_cards:
        projected = tokens * (gdn.conv_channels + 2 * gdn.values + 2 * gdn.v_heads) * item
        return projected + gdn_plan.scratch_bytes(gdn, tokens)
    projected = tokens * (2 * gdn.conv_channels + 3 * gdn.values) * item
    # per value head and token: q, k, beta k, Wk; v, U, V', O; rows of A, (I + A)^-1, D, Q K^T; 1/64 of a state
    row = 4 * gdn.k_dim + 4 * gdn.v_dim + 4 * 64 + gdn.k_dim * gdn.v_dim // 64
    return projected + min(tokens, GDN_RANGE_TOKENS) * gdn.v_heads * row * 4
