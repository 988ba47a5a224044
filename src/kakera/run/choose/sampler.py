"""From logits to tokens for a whole batch on the device: penalties, masks, filters, and noise (noise.py).

The token of a row is a function of its logits, its request's wishes, and (seed, choice, position): it does not depend
on what else runs in the batch, on preemption, on the device, or on what was guessed (drafts).

A row's token has to be the same in any batch. Values are ranked in one order (ranking.py), and probabilities are
summed as integers: the order in which a kernel sums floats depends on the shape of the batch, and so do their sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.contract.events import TokenLogprob
from kakera.run.choose.logprobs import Logprobs
from kakera.run.choose.noise import gumbel
from kakera.run.choose.picks import TOP_BOUND, Pick, Rank, flat
from kakera.run.choose.ranking import in_pieces, top_ids
from kakera.run.transfer import Download, upload

SORTED_ROWS = 4  # at a time: beside 5 copies of them torch's sort on a GPU takes about 8 more, 52 MB in all
UNIT = 2.0**42  # the largest probability as an integer: 2^18 tokens sum to 2^60, and what rounds to 0 is below 2.3e-13


@dataclass(frozen=True)
class Sampled:
    """A row's token and, if its request asked, the log-probability; or what is wrong with this row alone."""

    token: int
    logprob: TokenLogprob | None = None
    error: str = ""


@dataclass(frozen=True)
class Launched:
    """Tokens that the device is choosing. The next step may read `tokens_R` before the host has seen them.

    tokens_R: int64, ids of the vocabulary in any case; finite_R: bool, False where a row's logits are not finite and
    its token means nothing. Both on the device of the logits.
    """

    tokens_R: Tensor
    finite_R: Tensor
    asked: tuple[int, ...]
    logprobs: Logprobs
    chosen: Download


@torch.inference_mode()
def launch(picks: Sequence[Pick], logits_RV: Tensor) -> Launched:
    """Queue the choice of a token for each row of float32 logits [R, vocabulary], contiguous; waits for nothing.

    Beside the logits it takes a copy of them if any row has penalties, bias or a mask, 4 copies of PIECE_ROWS rows
    or 13 of SORTED_ROWS, and 4 of one row: with the logits less than the SAMPLER_COPIES of the plan, which are of 64
    rows or more.
    """
    given = flat(picks, logits_RV.shape[-1])
    on = upload(given, logits_RV.device)
    greedy_R = logits_RV.argmax(-1)
    finite_R = logits_RV.gather(-1, greedy_R[:, None]).isfinite()[:, 0]  # NaN and infinity win every argmax
    adjusted_RV = _adjusted(logits_RV, on)
    tokens_R = greedy_R if adjusted_RV is logits_RV else adjusted_RV.argmax(-1)
    tokens_R = _drawn(tokens_R, adjusted_RV, on)
    tokens_R = torch.where(on["forced_R"] >= 0, on["forced_R"], tokens_R)
    asked = tuple(given["asked_A"].tolist())
    alternatives = [picks[i].sampling.logprobs or 0 for i in asked]
    return Launched(
        tokens_R,
        finite_R,
        asked,
        Logprobs(logits_RV, on["asked_A"], tokens_R.index_select(0, on["asked_A"]), alternatives),
        Download(torch.stack([tokens_R, finite_R.long()])),
    )


def collect(launched: Launched) -> list[Sampled]:
    """Wait for the tokens: one transfer, and another if log-probabilities were asked for."""
    tokens, finite = launched.chosen.wait().tolist()
    logprobs = dict(zip(launched.asked, launched.logprobs.wait(), strict=True))
    return [
        Sampled(token, logprobs.get(i))
        if sound
        else Sampled(token, error="the model produced logits that are not finite")
        for i, (token, sound) in enumerate(zip(tokens, finite, strict=True))
    ]


def _adjusted(logits_RV: Tensor, on: dict[str, Tensor]) -> Tensor:
    """Penalties, bias, the minimum length, and what grammars allow. Returns `logits_RV` itself if nothing applies."""
    ids_N, masked_G = on["ids_N"], on["masked_G"]
    if not len(ids_N) and not len(masked_G):
        return logits_RV
    out_RV = logits_RV.clone()
    if len(ids_N):
        all_values = out_RV.view(-1)
        divisor_N, minus_N, plus_N = on["steps_3N"]
        values_N = all_values.index_select(0, ids_N)
        values_N = torch.where(values_N > 0, values_N / divisor_N, values_N * divisor_N)
        all_values.index_copy_(0, ids_N, values_N - minus_N + plus_N)
    # last: no bias brings a token back
    for rows_P, bits_PB in zip(in_pieces(masked_G), in_pieces(on["bits_GB"]), strict=True):
        values_PV = out_RV.index_select(0, rows_P).masked_fill_(_banned(bits_PB, out_RV.shape[-1]), -torch.inf)
        out_RV.index_copy_(0, rows_P, values_PV)
    return out_RV


def _banned(bits_PB: Tensor, vocabulary: int) -> Tensor:
    """Packed bits, least significant first, as bool [P, vocabulary]; True where a bit is 0."""
    places_8 = torch.arange(8, dtype=torch.uint8, device=bits_PB.device)
    return ((bits_PB[:, :, None] >> places_8) & 1).logical_not().flatten(1)[:, :vocabulary]


def _drawn(tokens_R: Tensor, logits_RV: Tensor, on: dict[str, Tensor]) -> Tensor:
    """The tokens, with those of rows that have a temperature drawn: the largest sum of logit and noise among the tokens
    that the row's filters leave."""
    rows_S, numbers_S4 = on["top_rows_S"], on["top_numbers_S4"]
    if len(rows_S):
        count = min(TOP_BOUND, logits_RV.shape[-1])
        ids_SK = torch.cat([top_ids(logits_RV.index_select(0, rows_P), count) for rows_P in in_pieces(rows_S)])
        values_SK = logits_RV[rows_S[:, None], ids_SK]
        places_K = torch.arange(count, device=ids_SK.device)
        values_SK.masked_fill_(places_K >= _kept(values_SK.clone(), numbers_S4), -torch.inf)
        best_S1 = _race(values_SK, ids_SK, on["top_keys_S1"], numbers_S4)
        tokens_R = tokens_R.index_copy(0, rows_S, ids_SK.gather(-1, best_S1)[:, 0])
    drawn_of_all = len(on["sorted_rows_S"]) or len(on["all_rows_S"])
    ids_V = torch.arange(logits_RV.shape[-1] if drawn_of_all else 0, device=logits_RV.device)
    for rows_P, keys_P1, numbers_P4 in _pieces("sorted", on):
        least_P1, last_P1 = _last(logits_RV, rows_P, numbers_P4)
        values_PV = logits_RV.index_select(0, rows_P)
        dropped_PV = (values_PV == least_P1).logical_and_(ids_V > last_P1).logical_or_(values_PV < least_P1)
        best_P1 = _race(values_PV.masked_fill_(dropped_PV, -torch.inf), ids_V, keys_P1, numbers_P4)
        tokens_R = tokens_R.index_copy(0, rows_P, best_P1[:, 0])
        del values_PV, dropped_PV  # before the next piece is sorted
    for rows_P, keys_P1, numbers_P4 in _pieces("all", on):
        best_P1 = _race(logits_RV.index_select(0, rows_P), ids_V, keys_P1, numbers_P4)
        tokens_R = tokens_R.index_copy(0, rows_P, best_P1[:, 0])
    return tokens_R


def _pieces(rank: Rank, on: dict[str, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Rows, keys and numbers of at most SORTED_ROWS rows of a rank at a time."""
    names = (f"{rank}_rows_S", f"{rank}_keys_S1", f"{rank}_numbers_S4")
    return zip(*(in_pieces(on[name], SORTED_ROWS) for name in names), strict=True)


def _race(values_SK: Tensor, ids_K: Tensor, keys_S1: Tensor, numbers_S4: Tensor) -> Tensor:
    """Where the largest sum of (value / temperature) and noise stands, int64 [S, 1]; among equals the first."""
    noise_SK = gumbel(keys_S1, ids_K)
    gaps_SK = values_SK.double().sub_(values_SK.amax(-1, keepdim=True))  # 1e-30 is to leave differences, too
    return noise_SK.add_(gaps_SK.div_(numbers_S4[:, :1])).argmax(-1, keepdim=True)


def _last(logits_RV: Tensor, rows_P: Tensor, numbers_P4: Tensor) -> tuple[Tensor, Tensor]:
    """Value and id of the last token that the rows' filters leave, in the order of `top_ids`; both [P, 1]."""
    by_value = torch.sort(logits_RV.index_select(0, rows_P), dim=-1, descending=True, stable=True)
    last_P1 = by_value.indices.gather(-1, _kept(by_value.values, numbers_P4) - 1)  # overwrites the values
    return logits_RV[rows_P[:, None], last_P1], last_P1


def _kept(values_SK: Tensor, numbers_S4: Tensor) -> Tensor:
    """How many of the largest values top-k, top-p and min-p leave under the temperature: int64 [S, 1], at least one.

    values_SK: largest first, overwritten. Since they are, each filter keeps the first so many, and one running sum of
    weights (the largest is UNIT) serves them all. Rows that are not finite give nonsense within range.
    """
    temperature_S1, top_p_S1, min_p_S1, top_k_S1 = numbers_S4.split(1, -1)  # type: ignore[no-untyped-call]
    weights_SK = values_SK.sub_(values_SK[:, :1].clone()).div_(temperature_S1.float()).exp_()
    kept_S1 = torch.minimum(top_k_S1.long(), (weights_SK >= min_p_S1.float()).sum(-1, keepdim=True))
    sums_SK = weights_SK.mul_(UNIT).long().cumsum_(-1)
    wanted_S1 = (top_p_S1 * sums_SK.gather(-1, top_k_S1.long() - 1)).ceil().long()
    kept_S1 = torch.minimum(kept_S1, torch.searchsorted(sums_SK, wanted_S1) + 1)
    return kept_S1.clamp_(1, values_SK.shape[-1])  # the first always stays
