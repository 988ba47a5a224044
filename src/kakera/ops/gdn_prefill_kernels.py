# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernels of Gated DeltaNet's prefill: what is free of the state for all chunks at once, then the state.

The WY form of `gated_delta_chunk`, arranged so that what is stored between kernels is small. With T' = (I + A)^-1
diag(beta), the corrections of a chunk are

    V' = U - W S = T' (V - diag(exp(G)) K S)

so that the pass over the state needs one 64 x 64 matrix per chunk and value head in place of U and W (8 KB, not 32).

Operands of products are fp16, sums and the state fp32, the inverse fp32 throughout. Every operand is bounded: rows of
K and Q have norm 1 (the scale of q comes last), |T'| <= 1 as a product of contractions, and V and S have the
activations' own size, clamped to fp16's. Error of the gated outputs against float64, 4 / 12 heads of 128, 512 tokens
(2,048 give the same): 4.9e-4 with fp16 operands, 3.9e-3 with bf16 ones, where rounding the exact ones to bf16 costs
1.7e-3; of the state 5.5e-4 and 4.5e-3.

Letters of shapes: M chunks of a range, J key heads, V value heads, K key channels, D value channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)  # of the inverse
FP16_MAX = tl.constexpr(65504.0)
L2_EPS = tl.constexpr(1e-6)
SOFTPLUS_LINEAR = tl.constexpr(20.0)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # which has no inline assembly


@triton.jit
def _half(x):
    """fp16, clamped: an infinity in the state would never leave it."""
    if INTERPRETED:
        half = tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX).to(tl.float16)
    else:  # one instruction for two values; as minimum and maximum it is a third of what the state pass issues
        half = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    return half


@triton.jit
def _convolved(mixed, columns, taps, chunk, channel, tokens, STRIDE: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr):
    """SiLU of the causal convolution of a chunk, fp32 [64, channels]; 0 from the span's end on."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK, channel.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        row = token - (TAPS - 1 - tap)
        seen = (row >= 0) & (row < tokens)
        at = row.to(tl.int64)[:, None] * STRIDE + channel[None, :]
        x = tl.load(mixed + at, mask=seen[:, None], other=0.0).to(tl.float32)
        if tap < TAPS - 1:  # noqa: SIM102 (known when compiling, the inner one is not)
            if chunk == 0:
                before = columns + (row + TAPS - 1)[:, None] * C + channel[None, :]
                x += tl.load(before, mask=(row < 0)[:, None], other=0.0).to(tl.float32)
        total += x * tl.load(taps + tap * C + channel)[None, :]
    return tl.where((token < tokens)[:, None], total / (1.0 + tl.exp(-total)), 0.0)


@triton.jit
def _beta(gates, token, tokens, STRIDE: tl.constexpr):
    """Of some tokens of one head; 0 from the span's end on."""
    valid = token < tokens
    b = tl.load(gates + token.to(tl.int64) * STRIDE, mask=valid, other=0.0).to(tl.float32)
    return tl.where(valid, 1.0 / (1.0 + tl.exp(-b)), 0.0)


@triton.jit
def _log_decay(gates, rate, dt_bias, token, tokens, STRIDE: tl.constexpr, V: tl.constexpr):
    """g of some tokens of one head; 0 from the span's end on."""
    valid = token < tokens
    a = tl.load(gates + token.to(tl.int64) * STRIDE + V, mask=valid, other=0.0).to(tl.float32) + dt_bias
    softplus = tl.where(a > SOFTPLUS_LINEAR, a, tl.log(1.0 + tl.exp(tl.minimum(a, SOFTPLUS_LINEAR))))
    return tl.where(valid, rate * softplus, 0.0)


@triton.jit(do_not_specialize=["first", "tokens"])
def prepare(
    mixed,  # [tokens, STRIDE]: q | k | v | z | b | a
    columns,  # [TAPS - 1, C]: what lies before token 0
    taps,  # fp32 [TAPS, C]
    rate,  # fp32 [V]
    dt_bias,  # fp32 [V]
    qk,  # out, fp16 [M, 2 J, 64, K]: heads of q, then of k, all of norm 1
    v,  # out, fp16 [M, V, D, 64]: transposed, as the state is
    overlap,  # out, fp32 [M, J, 64, 64]: K K^T
    scores,  # out, fp16 [M, V, 64, 64]: (Q K^T) * decay, lower with diagonal
    decays,  # out, fp32 [M, V, 3, 64]: G, exp(G), exp(G_last - G)
    first,  # chunk of the span with which the range starts
    tokens,
    STRIDE: tl.constexpr,
    J: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Convolution, SiLU, norms, decays and scores of one chunk of one head: grid (J + V, M), key heads first."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = 2 * J * K + V * D
    row = tl.arange(0, CHUNK)
    token = (first + chunk) * CHUNK + row
    if head < J:
        key = tl.arange(0, K)
        tile = row[:, None] * K + key[None, :]
        to = qk + (chunk * 2 * J + head).to(tl.int64) * (CHUNK * K)
        k = _convolved(mixed, columns, taps, first + chunk, (J + head) * K + key, tokens, STRIDE, C, TAPS)
        k = (k * tl.rsqrt(tl.sum(k * k, 1) + L2_EPS)[:, None]).to(tl.float16)
        tl.store(to + J * CHUNK * K + tile, k)
        q = _convolved(mixed, columns, taps, first + chunk, head * K + key, tokens, STRIDE, C, TAPS)
        q = (q * tl.rsqrt(tl.sum(q * q, 1) + L2_EPS)[:, None]).to(tl.float16)
        tl.store(to + tile, q)
        square = row[:, None] * CHUNK + row[None, :]
        tl.store(overlap + (chunk * J + head).to(tl.int64) * (CHUNK * CHUNK) + square, tl.dot(k, tl.trans(k)))
        product = tl.dot(q, tl.trans(k))
        seen = row[:, None] >= row[None, :]
        for member in range(V // J):
            of = head * (V // J) + member
            gates = mixed + (C + V * D) + of
            g = _log_decay(gates, tl.load(rate + of), tl.load(dt_bias + of), token, tokens, STRIDE, V)
            sum_ = tl.cumsum(g, 0)
            unit = (chunk * V + of).to(tl.int64)
            of_unit = decays + unit * (3 * CHUNK) + row
            tl.store(of_unit, sum_)
            tl.store(of_unit + CHUNK, tl.exp(sum_))
            tl.store(of_unit + 2 * CHUNK, tl.exp(tl.sum(g, 0) - sum_))
            decay = tl.exp(tl.where(seen, sum_[:, None] - sum_[None, :], float("-inf")))
            tl.store(scores + unit * (CHUNK * CHUNK) + square, (product * decay).to(tl.float16))
    else:
        value = tl.arange(0, D)
        channel = 2 * J * K + (head - J) * D + value
        x = _convolved(mixed, columns, taps, first + chunk, channel, tokens, STRIDE, C, TAPS)
        to = v + (chunk * V + head - J).to(tl.int64) * (D * CHUNK)
        tl.store(to + value[:, None] * CHUNK + row[None, :], tl.trans(_half(x)))


@triton.jit
def _at(block: tl.constexpr):
    return tl.arange(0, BLOCK) + block * BLOCK


@triton.jit
def _strictly_upper(overlap, beta, total, i: tl.constexpr):
    """A^T of a block on the diagonal; K K^T is symmetric."""
    row, column = _at(i)[:, None], _at(i)[None, :]
    decay = tl.exp(tl.where(row < column, total[None, :] - total[:, None], float("-inf")))
    return tl.load(overlap + row * CHUNK + column) * decay * beta[None, :]


@triton.jit
def _below(overlap, beta, total_i, total_j, i: tl.constexpr, j: tl.constexpr):
    """A of a block below the diagonal: no exponent is positive."""
    x = tl.load(overlap + _at(i)[:, None] * CHUNK + _at(j)[None, :])
    return x * tl.exp(total_i[:, None] - total_j[None, :]) * beta[:, None]


@triton.jit
def _next_row(inverse, upper, i):
    """Row i of (I + A)^-1: e_i less row i of A times the rows above. `upper` is A^T."""
    row, column = _at(0)[:, None], _at(0)[None, :]
    factors = tl.sum(tl.where(column == i, upper, 0.0), 1)
    taken = tl.sum(factors[:, None] * inverse, 0)
    return tl.where(row == i, inverse - taken[None, :], inverse)


@triton.jit
def _times(x, y):
    return tl.dot(x, y, input_precision="tf32x3")  # one pass would leave 1e-3


@triton.jit
def _store_block(matrix, block, beta, i: tl.constexpr, j: tl.constexpr):
    tl.store(matrix + _at(i)[:, None] * CHUNK + _at(j)[None, :], (block * beta[None, :]).to(tl.float16))


@triton.jit(do_not_specialize=["first", "tokens"])
def invert(
    mixed,
    overlap,  # fp32 [M, J, 64, 64]: K K^T
    decays,  # fp32 [M, V, 3, 64]
    inverse,  # out, fp16 [M, V, 64, 64]: T'
    first,
    tokens,
    STRIDE: tl.constexpr,
    J: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
):
    """T' of one chunk of one value head: grid (V, M).

    Four blocks of 16 on the diagonal are inverted row by row, side by side; the rest follows by products. A program is
    one warp, so that nothing waits for a barrier.
    """
    head, chunk = tl.program_id(0), tl.program_id(1)
    unit = (chunk * V + head).to(tl.int64)
    a = overlap + (chunk * J + head // (V // J)).to(tl.int64) * (CHUNK * CHUNK)
    g = decays + unit * (3 * CHUNK)
    gates = mixed + 2 * J * K + 2 * V * D + head
    token = (first + chunk) * CHUNK
    b0, g0 = _beta(gates, token + _at(0), tokens, STRIDE), tl.load(g + _at(0))
    b1, g1 = _beta(gates, token + _at(1), tokens, STRIDE), tl.load(g + _at(1))
    b2, g2 = _beta(gates, token + _at(2), tokens, STRIDE), tl.load(g + _at(2))
    b3, g3 = _beta(gates, token + _at(3), tokens, STRIDE), tl.load(g + _at(3))

    u0, u1 = _strictly_upper(a, b0, g0, 0), _strictly_upper(a, b1, g1, 1)
    u2, u3 = _strictly_upper(a, b2, g2, 2), _strictly_upper(a, b3, g3, 3)
    t0 = tl.where(_at(0)[:, None] == _at(0)[None, :], 1.0, 0.0)
    t1, t2, t3 = t0, t0, t0
    for i in range(1, BLOCK):
        t0, t1 = _next_row(t0, u0, i), _next_row(t1, u1, i)
        t2, t3 = _next_row(t2, u2, i), _next_row(t3, u3, i)

    to = inverse + unit * (CHUNK * CHUNK)
    zeros = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(i + 1, 4):
            _store_block(to, zeros, b0, i, j)
    _store_block(to, t0, b0, 0, 0)
    _store_block(to, t1, b1, 1, 1)
    _store_block(to, t2, b2, 2, 2)
    _store_block(to, t3, b3, 3, 3)
    a10 = _below(a, b1, g1, g0, 1, 0)
    t10 = -_times(t1, _times(a10, t0))
    _store_block(to, t10, b0, 1, 0)
    a20, a21 = _below(a, b2, g2, g0, 2, 0), _below(a, b2, g2, g1, 2, 1)
    t20 = -_times(t2, _times(a20, t0) + _times(a21, t10))
    t21 = -_times(t2, _times(a21, t1))
    _store_block(to, t20, b0, 2, 0)
    _store_block(to, t21, b1, 2, 1)
    a30, a31, a32 = _below(a, b3, g3, g0, 3, 0), _below(a, b3, g3, g1, 3, 1), _below(a, b3, g3, g2, 3, 2)
    t30 = -_times(t3, _times(a30, t0) + _times(a31, t10) + _times(a32, t20))
    t31 = -_times(t3, _times(a31, t1) + _times(a32, t21))
    t32 = -_times(t3, _times(a32, t2))
    _store_block(to, t30, b0, 3, 0)
    _store_block(to, t31, b1, 3, 1)
    _store_block(to, t32, b2, 3, 2)


@triton.jit
def _copy_columns(
    mixed, columns, saved, end, STRIDE: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, SAVE: tl.constexpr
):
    """The last columns before token `end` over those before token 0; every program takes a share of the channels."""
    BLOCK_C: tl.constexpr = 256
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    row = tl.arange(0, TAPS)[:, None]
    token = end - (TAPS - 1) + row
    for begin in range(program * BLOCK_C, C, tl.num_programs(0) * tl.num_programs(1) * BLOCK_C):
        channel = (begin + tl.arange(0, BLOCK_C))[None, :]
        valid = (row < TAPS - 1) & (channel < C)
        new = tl.load(mixed + token.to(tl.int64) * STRIDE + channel, mask=valid & (token >= 0), other=0.0)
        old = tl.load(columns + (token + TAPS - 1) * C + channel, mask=valid & (token < 0), other=0.0)
        x = tl.where(token >= 0, new.to(columns.dtype.element_ty), old)
        tl.debug_barrier()  # a thread's old column is where another thread stores
        tl.store(columns + row * C + channel, x, mask=valid)
        if SAVE:
            tl.store(saved + row * C + channel, x.to(saved.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["begin", "stop", "end"])
def advance(
    qk,  # fp16 [M, 2 J, 64, K]
    v,  # fp16 [M, V, D, 64]
    inverse,  # fp16 [M, V, 64, 64]
    scores,  # fp16 [M, V, 64, 64]
    decays,  # fp32 [M, V, 3, 64]
    o,  # out, fp16 [M, V, D, 64]: S^T q for q of norm 1
    state,  # fp32 [V, K, D], updated
    saved,  # [V, K, D], fp32 or fp16: gets the state too, if SAVE
    mixed,
    columns,  # [TAPS - 1, C], updated
    saved_columns,  # [TAPS - 1, C]: gets them too, if SAVE
    begin,  # chunks of the range: those from begin to stop - 1 are taken
    stop,
    end,  # token of the span where chunk stop - 1 ends
    STRIDE: tl.constexpr,
    J: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some chunks of one value head, one behind the other, for BLOCK_D of its columns: grid (D / BLOCK_D, V).

    Everything is transposed: then the left operand of each product is the result of the one before and stays in
    registers; the tiles that come from memory are right operands.
    """
    head = tl.program_id(1)
    key_head = head // (V // J)
    value = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    key, row = tl.arange(0, K), tl.arange(0, CHUNK)
    wide = row[:, None] * K + key[None, :]
    square = row[:, None] * CHUNK + row[None, :]
    flat = value[:, None] * CHUNK + row[None, :]
    state_tile = state + head * (K * D) + key[None, :] * D + value[:, None]
    s = tl.load(state_tile)
    for chunk in tl.range(begin, stop, num_stages=STAGES):
        unit = (chunk * V + head).to(tl.int64)
        queries = qk + (chunk * 2 * J + key_head).to(tl.int64) * (CHUNK * K) + wide
        k = tl.load(queries + J * CHUNK * K)
        t = tl.load(inverse + unit * (CHUNK * CHUNK) + square)
        q = tl.load(queries)
        a = tl.load(scores + unit * (CHUNK * CHUNK) + square)
        x = tl.load(v + unit * (D * CHUNK) + flat).to(tl.float32)
        grown = tl.load(decays + unit * (3 * CHUNK) + CHUNK + row)[None, :]
        remaining = tl.load(decays + unit * (3 * CHUNK) + 2 * CHUNK + row)[None, :]
        grown_last = tl.load(decays + unit * (3 * CHUNK) + 2 * CHUNK - 1)
        s_half = _half(s)
        x -= tl.dot(s_half, tl.trans(k)) * grown
        result = tl.dot(s_half, tl.trans(q)) * grown
        x = tl.dot(_half(x), tl.trans(t))
        s = tl.dot(_half(x * remaining), k, s * grown_last)
        result = tl.dot(_half(x), tl.trans(a), result)
        tl.store(o + unit * (D * CHUNK) + flat, _half(result))
    tl.store(state_tile, s)
    if SAVE:
        at = saved + head * (K * D) + key[None, :] * D + value[:, None]
        if saved.dtype.element_ty == tl.float16:
            tl.store(at, _half(s))
        else:
            tl.store(at, s)
    _copy_columns(mixed, columns, saved_columns, end, STRIDE, 2 * J * K + V * D, TAPS, SAVE)


@triton.jit(do_not_specialize=["first", "tokens", "eps"])
def normalise(
    o,  # fp16 [M, V, D, 64]
    mixed,
    scale,  # fp32 [D]
    y,  # out, [tokens, V D]
    first,
    tokens,
    eps,
    q_scale,
    STRIDE: tl.constexpr,
    J: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
):
    """The gated norm of one chunk of one value head: grid (V, M). Rounds where `rms_norm_gated` does."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, value = tl.arange(0, CHUNK), tl.arange(0, D)
    token = ((first + chunk) * CHUNK + row).to(tl.int64)[:, None]
    valid = token < tokens
    channel = head * D + value[None, :]
    z = tl.load(mixed + token * STRIDE + 2 * J * K + V * D + channel, mask=valid, other=0.0).to(tl.float32)
    x = tl.load(o + (chunk * V + head).to(tl.int64) * (D * CHUNK) + value[:, None] * CHUNK + row[None, :])
    x = tl.trans(x).to(tl.float32) * q_scale
    x *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = x.to(y.dtype.element_ty).to(tl.float32)
    gate = z / (1.0 + tl.exp(-z)) * tl.load(scale + value)[None, :]
    tl.store(y + token * (V * D) + channel, (gate * x).to(y.dtype.element_ty), mask=valid)
