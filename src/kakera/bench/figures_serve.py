"""Figures of a running server: the second turn, parallel streams, a long prompt beside running streams.

Every bar is a ratio of two measurements of one run, or a time that a reader of the stream would notice.
"""

from __future__ import annotations

from kakera.bench.client import Client
from kakera.bench.figure import Figure
from kakera.bench.load import BESIDE_STREAMS, level, prefill_beside, second_turn
from kakera.bench.quantiles import milliseconds
from kakera.bench.text import Prose

LONG_TOKENS = 8000
SHORT_TOKENS = 128
NEW_TOKENS = 128


async def warm_turn(client: Client, prose: Prose) -> list[Figure]:
    turn = await second_turn(client, prose, LONG_TOKENS)
    seen = f"{turn.warm_seconds:.3f} s after {turn.cold_seconds:.2f} s, {turn.cold_tokens:,} tokens"
    cached = f"{turn.cached_tokens:,} of {turn.warm_tokens:,} tokens"
    return [
        Figure("second turn: time to first token against cold", turn.ratio, "<=", 0.05, ".3f", note=seen),
        Figure("second turn: cached tokens", turn.cached_share, ">=", 0.95, ".3f", note=cached),
    ]


async def streams(client: Client, prose: Prose) -> list[Figure]:
    one = await level(client, prose, 1, SHORT_TOKENS, NEW_TOKENS)
    eight = await level(client, prose, 8, SHORT_TOKENS, NEW_TOKENS)
    ratio = eight.tokens_per_second / one.tokens_per_second
    seen = (
        f"{eight.tokens_per_second:.1f} against {one.tokens_per_second:.1f} tokens/s; "
        f"decode alone {eight.decode_tokens_per_second:.1f} against {one.decode_tokens_per_second:.1f}"
    )
    return [Figure("8 streams against 1: tokens/s", ratio, ">=", 2.5, note=seen)]


async def beside(client: Client, prose: Prose) -> list[Figure]:
    found = await prefill_beside(client, prose, BESIDE_STREAMS, LONG_TOKENS)
    gaps = f"p95 {milliseconds(found.beside.p95)} ms against {milliseconds(found.alone.p95)} ms alone"
    speed = f"{found.shared_prefill:.0f} against {found.solo_prefill:.0f} tokens/s, {found.prompt_tokens:,} tokens"
    return [
        Figure("4 streams beside a long prefill: p95 inter-token time", found.slowdown, "<=", 8, ".1f", "x", gaps),
        Figure("4 streams beside a long prefill: longest gap", found.beside.max, "<=", 0.8, ".2f", " s"),
        Figure("long prefill beside 4 streams: speed kept", found.kept, ">=", 0.5, note=speed),
    ]
