"""The sampler as its definition reads: one row at a time, one wish after the other, probabilities as floats."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from kakera.constrain.output import Allowed
from kakera.contract.events import TokenLogprob
from kakera.contract.request import Sampling
from kakera.contract.step import SamplingInput
from kakera.run.choose.logprobs import LOGPROB_FLOOR
from kakera.run.choose.noise import gumbel_reference, noise_key

SMALLEST_TEMPERATURE = 1e-30


def sample_row(row: SamplingInput, logits_V: Tensor, allowed: Allowed) -> tuple[int, TokenLogprob | None]:
    """The row's token and the log-probability it asked for."""
    sampling = row.sampling
    greedy = int(logits_V.argmax())
    if not math.isfinite(float(logits_V[greedy])):
        raise ValueError("the model produced logits that are not finite")
    adjusted_V = _adjust(row, logits_V, allowed)
    if allowed.forced is not None:
        token = allowed.forced
    elif sampling.temperature == 0.0:
        token = greedy if adjusted_V is logits_V else int(adjusted_V.argmax())
    else:
        token = _draw(sampling, adjusted_V, noise_key(sampling.seed, sampling.choice, len(row.context)))
    wanted = sampling.logprobs
    return token, None if wanted is None else logprob_of(logits_V, token, wanted)


def _adjust(row: SamplingInput, logits_V: Tensor, allowed: Allowed) -> Tensor:
    """Penalties, bias, the minimum length, and what a grammar allows. Returns `logits_V` itself if nothing applies."""
    s = row.sampling
    output = row.context[row.prompt_tokens :]
    banned = [t for t in s.stop_token_ids if 0 <= t < len(logits_V)] if len(output) < s.min_tokens else []
    banned += allowed.banned
    penalised = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
    if not (penalised or s.logit_bias or banned or allowed.bits is not None):
        return logits_V
    out_V = logits_V.clone()
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.context)), device=out_V.device)
        values = out_V[seen]
        out_V[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if output and (s.presence_penalty or s.frequency_penalty):
        counts = Counter(output)
        ids = torch.tensor(list(counts), device=out_V.device)
        times = torch.tensor(list(counts.values()), dtype=out_V.dtype, device=out_V.device)
        out_V[ids] -= s.presence_penalty + s.frequency_penalty * times
    for token, bias in s.logit_bias:
        out_V[token] += bias
    if banned:
        out_V[torch.tensor(banned, device=out_V.device)] = -math.inf
    if allowed.bits is not None:  # last: no bias brings a token back
        out_V.masked_fill_(~_mask(allowed.bits, out_V), -math.inf)
    return out_V


def _mask(bits: bytes, like_V: Tensor) -> Tensor:
    """Packed bits, least significant first, as bool [vocabulary]."""
    packed_B = torch.frombuffer(bytearray(bits), dtype=torch.uint8).to(like_V.device)  # 31 KB for 248,320 tokens
    places_8 = torch.arange(8, dtype=torch.uint8, device=like_V.device)
    return ((packed_B[:, None] >> places_8) & 1).bool().flatten()[: len(like_V)]


def _draw(sampling: Sampling, logits_V: Tensor, key: int) -> int:
    """Temperature, then top-k, top-p and min-p on the sorted distribution, then the largest sum with noise."""
    top_K, ids_K = logits_V.sort(descending=True, stable=True)
    if 0 < sampling.top_k < logits_V.numel():
        top_K, ids_K = top_K[: sampling.top_k], ids_K[: sampling.top_k]
    # the largest becomes 0 first: a temperature of 1e-40, which is as good as greedy, must not make infinities of all
    scaled_K = (top_K - top_K[0]).double() / max(sampling.temperature, SMALLEST_TEMPERATURE)
    probs_K = torch.softmax(scaled_K, -1)
    kept_K = scaled_K > -math.inf
    if sampling.top_p < 1.0:
        before_K = probs_K.cumsum(-1) - probs_K
        before_K[0] = -1.0  # the most likely token always stays, also for top_p = 0
        kept_K &= before_K < sampling.top_p
    if sampling.min_p > 0.0:
        kept_K &= probs_K >= sampling.min_p * probs_K[0]
    scores = [float(x + gumbel_reference(key, int(i))) for x, i in zip(scaled_K[kept_K], ids_K[kept_K], strict=True)]
    return int(ids_K[kept_K][scores.index(max(scores))])


def logprob_of(logits_V: Tensor, token: int, alternatives: int) -> TokenLogprob:
    """Log-probability of `token` under the model itself (before penalties and temperature), and the top ones."""
    logprobs_V = torch.log_softmax(logits_V.float(), -1)
    top_K = logits_V.sort(descending=True, stable=True).indices[:alternatives].tolist()
    pairs = [(t, float(logprobs_V[t])) for t in top_K]
    return TokenLogprob(
        token=token,
        logprob=max(float(logprobs_V[token]), LOGPROB_FLOOR),
        top=tuple((t, max(p, LOGPROB_FLOOR)) for t, p in pairs),
    )
