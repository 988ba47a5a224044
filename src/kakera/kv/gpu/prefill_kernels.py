# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernels of prefill attention: cached pages to fp16 rows, merging of partial results, the diagonal band.

A row is one query head of one token: row t G + g of a KV head, so that every tile of rows lies inside a KV group,
whatever G is, and 64 G rows are a page of queries. Integers that change from call to call are not specialised, or
each would compile anew.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAGE = tl.constexpr(64)
FP16_MAX = tl.constexpr(65504.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # below every logit and finite: a row whose first block is masked has weight 0, not NaN


@triton.jit(do_not_specialize=["first_page", "tokens", "head"])
def unpack_int2(
    codes,  # uint8 [P, 2, KV_HEADS, 64, D / 4], planar quarters
    parameters,  # fp16 [P, 2, KV_HEADS, 2 (scale, minimum), D / GROUP, 64]
    table,  # page ids of the sequence
    to,  # fp16 [2, HEADS, tokens, D]
    first_page,
    tokens,
    head,
    codes_stride,
    parameters_stride,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One page of the keys or the values of one head: grid (pages, 2 HEADS)."""
    page, plane = tl.program_id(0), tl.program_id(1)
    source = plane // HEADS * KV_HEADS + head + plane % HEADS
    identity = tl.load(table + first_page + page).to(tl.int64)
    token = tl.arange(0, PAGE)[:, None]
    byte = tl.arange(0, D // 4)[None, :]
    code = tl.load(codes + identity * codes_stride + source * (PAGE * D // 4) + token * (D // 4) + byte).to(tl.int32)
    scales = parameters + identity * parameters_stride + source * (2 * D // GROUP * PAGE) + token
    out = to + (plane.to(tl.int64) * tokens + page * PAGE) * D + token * D + byte
    for quarter in tl.static_range(4):
        if GROUP * 4 >= D:
            at = quarter * D // 4 // GROUP * PAGE
        else:
            at = (quarter * (D // 4) + byte) // GROUP * PAGE
        scale = tl.load(scales + at).to(tl.float32)
        minimum = tl.load(scales + at + D // GROUP * PAGE).to(tl.float32)
        value = ((code >> (2 * quarter)) & 3).to(tl.float32) * scale + minimum
        value = tl.minimum(tl.maximum(value, -FP16_MAX), FP16_MAX)
        tl.store(out + quarter * (D // 4), value.to(tl.float16))


@triton.jit(do_not_specialize=["first_page", "tokens", "limit", "head"])
def copy_pages(
    pages,  # bf16 [P, 2, KV_HEADS, 64, D]
    table,  # page ids of the sequence; anything if not HAS_TABLE
    to,  # fp16 [2, HEADS, tokens, D]
    first_page,
    tokens,
    limit,  # rows from here on are 0: what lies behind a sequence's last token may be NaN
    head,
    page_stride,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """The same for pages of bf16. Its 8 bits fit fp16's 11; values beyond 65,504 are clamped."""
    page, plane = tl.program_id(0), tl.program_id(1)
    source = plane // HEADS * KV_HEADS + head + plane % HEADS
    if HAS_TABLE:
        identity = tl.load(table + first_page + page).to(tl.int64)
    else:
        identity = (first_page + page).to(tl.int64)
    token = tl.arange(0, PAGE)[:, None]
    channel = tl.arange(0, D)[None, :]
    valid = page * PAGE + token < limit
    from_ = pages + identity * page_stride + source * (PAGE * D) + token * D + channel
    value = tl.load(from_, mask=valid, other=0.0).to(tl.float32)
    value = tl.minimum(tl.maximum(value, -FP16_MAX), FP16_MAX)
    tl.store(to + (plane.to(tl.int64) * tokens + page * PAGE) * D + token * D + channel, value.to(tl.float16))


@triton.jit(do_not_specialize=["rows", "first_row", "state_rows", "splits", "first"])
def merge(
    o,  # fp16 [HEADS, splits, rows, D]: softmax over one part of the keys each
    lse,  # fp32 [HEADS, splits, rows]: natural logarithm of the sum of exponentials
    state_o,  # fp32 [HEADS, state_rows, D]
    state_lse,  # fp32 [HEADS, state_rows]
    rows,
    first_row,
    state_rows,
    splits,
    first,  # 1: the state holds nothing yet. Not a variant, which would be compiled in the midst of a long prompt
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """state <- softmax over the state's keys and these: grid (blocks of rows, HEADS)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, D)[None, :]
    valid = row < rows
    part = head * splits * rows + row
    state = head * state_rows + first_row + row
    if first == 1:
        total = tl.load(lse + part, mask=valid, other=0.0)
        mean = tl.load(o + part[:, None] * D + channel, mask=valid[:, None], other=0.0).to(tl.float32)
    else:
        total = tl.load(state_lse + state, mask=valid, other=0.0)
        mean = tl.load(state_o + state[:, None] * D + channel, mask=valid[:, None], other=0.0)
    for split in range(first, splits):
        at = part + split * rows
        other = tl.load(lse + at, mask=valid, other=0.0)
        value = tl.load(o + at[:, None] * D + channel, mask=valid[:, None], other=0.0).to(tl.float32)
        top = tl.maximum(total, other)
        sum_ = top + tl.log(tl.exp(total - top) + tl.exp(other - top))
        mean = mean * tl.exp(total - sum_)[:, None] + value * tl.exp(other - sum_)[:, None]
        total = sum_
    tl.store(state_lse + state, total, mask=valid)
    tl.store(state_o + state[:, None] * D + channel, mean, mask=valid[:, None])


@triton.jit
def _take_in(
    state,  # (sums of weighted values, sums of weights, largest logits in base 2)
    q,
    keys,  # fp16 [.., D]; its row 0 is token `origin`
    values,
    origin,
    begin,
    end,
    position,
    MASK: tl.constexpr,  # "none"; "history": pages before a row's window; "window": its window, causal
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The online softmax over tokens begin .. end - 1, both multiples of BLOCK_N."""
    acc, total, top = state
    column = tl.arange(0, BLOCK_N)
    channel = tl.arange(0, D)[None, :]
    for first in tl.range(begin, end, BLOCK_N):
        offset = (first - origin + column)[:, None] * D + channel
        k = tl.load(keys + offset)
        logit = tl.dot(q, tl.trans(k)) * LOG2_E
        if MASK != "none":
            key = (first + column)[None, :]
            window = (position // PAGE - R)[:, None]
            if MASK == "history":
                logit = tl.where(key // PAGE < window, logit, float("-inf"))
            else:
                seen = (key // PAGE >= window) & (key <= position[:, None])
                logit = tl.where(seen, logit, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, 1))
        p = tl.exp2(logit - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = tl.load(values + offset)
        acc = tl.dot(p.to(tl.float16), v, acc)
        top = new_top
    return acc, total, top


@triton.jit(
    do_not_specialize=["rows", "state_rows", "start", "common", "history_tokens", "band_first", "band_tokens", "head"]
)
def diagonal(
    q,  # fp16 [HEADS, state_rows, D], scaled
    history,  # fp16 [2, HEADS, history_tokens, D] from token `common` on, as decoded from the cache
    band,  # fp16 [2, HEADS, band_tokens, D] from token `band_first` on
    state_o,
    state_lse,
    out,  # [tokens, KV_HEADS G, D]
    rows,  # tokens G of the segment
    state_rows,
    start,
    common,  # keys before this token are in the state of every row
    history_tokens,
    band_first,
    band_tokens,
    head,
    out_stride,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SUB: tl.constexpr,  # query tokens that share the end of what is in the state,
    GRID: tl.constexpr,  # which is a multiple of this
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What the library did not take, merged with what it did: grid (tiles of rows, HEADS)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a SUB are the longest: they go first
    local = tl.program_id(1).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, D)[None, :]
    token = row // G
    position = start + token
    first_token = tile * BLOCK_M // G
    last_token = (tl.minimum(tile * BLOCK_M + BLOCK_M, rows) - 1) // G
    first_page, last_page = (start + first_token) // PAGE, (start + last_token) // PAGE
    covered = tl.maximum(start + first_token // SUB * SUB - R * PAGE, 0) // GRID * GRID
    covered = tl.maximum(covered, common)
    valid = row < rows

    at = (local * state_rows + row)[:, None] * D + channel
    queries = tl.load(q + at, mask=valid[:, None], other=0.0)
    # what the library found is where the online softmax goes on from; merging at the end would need its rows in
    # registers beside the sums, and spills
    known = row < tl.where(covered > 0, rows, 0)
    acc = tl.load(state_o + at, mask=known[:, None], other=0.0)
    total = known.to(tl.float32)
    top = tl.load(state_lse + local * state_rows + row, mask=known, other=LOWEST) * LOG2_E
    state = (acc, total, top)
    keys = history + local * history_tokens * D
    values = keys + HEADS * history_tokens.to(tl.int64) * D
    shared = tl.maximum(first_page - R, 0) * PAGE
    state = _take_in(state, queries, keys, values, common, covered, shared, position, "none", R, D, BLOCK_N)
    if (PAGE * G) % BLOCK_M != 0:  # else the rows of a tile are of one page
        begin, end = tl.maximum(shared, covered), tl.maximum(last_page - R, 0) * PAGE
        state = _take_in(state, queries, keys, values, common, begin, end, position, "history", R, D, BLOCK_N)
    keys = band + local * band_tokens * D
    values = keys + HEADS * band_tokens.to(tl.int64) * D
    end = (last_page + 1) * PAGE
    state = _take_in(state, queries, keys, values, band_first, shared, end, position, "window", R, D, BLOCK_N)

    acc, total, top = state
    head_of_row = (head + local) * G + row % G
    to = out + token[:, None].to(tl.int64) * out_stride + head_of_row[:, None] * D + channel
    tl.store(to, (acc * (1 / total)[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
