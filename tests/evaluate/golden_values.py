"""Compare a model with golden values that another implementation computed: logits, likelihoods, greedy text, drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from kakera.contract.request import Request, Sampling
from kakera.evaluate.forced import Forced
from kakera.evaluate.ppl import token_nll
from kakera.evaluate.session import open_engine, open_forced
from kakera.model.mtp import draft_hidden
from kakera.plan.plan import Wishes
from kakera.run.generate import generate

EXACT = Wishes(gpus="cpu", context=2048, max_running=8, kv="fp32", host_cache=0)


@dataclass(frozen=True)
class GoldenReport:
    """One prompt against its golden values.

    `logit_difference`: largest, over the whole vocabulary at the last position. `nll_difference`: largest over all
    positions, nats. `greedy_equal`: leading greedy tokens that agree, of `greedy_total`; `margin` is the golden gap
    between the two best logits where they part (None if they never do). `drafts_equal` of `drafts_total`: argmax of
    the draft layer (both 0 for a model without one).
    """

    name: str
    logit_difference: float
    nll_difference: float
    greedy_equal: int
    greedy_total: int
    margin: float | None
    drafts_equal: int
    drafts_total: int


def check_goldens(directory: Path, goldens: Path, logits: Path, wishes: Wishes = EXACT) -> list[GoldenReport]:
    """Run every prompt of `goldens` (json) through the model; `logits` (safetensors) holds `NAME.last_logits`.

    Likelihoods come from prefill, greedy text from the engine with all prompts batched together.
    """
    cases = json.loads(goldens.read_text())["cases"]
    wanted = load_file(logits)
    longest = max(len(case["input_ids"]) for case in cases)
    forced = open_forced(directory, wishes, longest, draft=True)
    greedy = _greedy(directory, cases, wishes)
    return [_compare(forced, case, wanted[f"{case['name']}.last_logits"], greedy[case["name"]]) for case in cases]


def _greedy(directory: Path, cases: Sequence[dict[str, Any]], wishes: Wishes) -> dict[str, list[int]]:
    sampling = Sampling(max_tokens=max(len(case["greedy"]) for case in cases), seed=0, temperature=0.0)
    requests = [Request(case["name"], tuple(case["input_ids"]), sampling) for case in cases]
    completions = generate(open_engine(directory, wishes), requests)
    return {name: completion.tokens for name, completion in completions.items()}


def _compare(forced: Forced, case: dict[str, Any], logits_V: Tensor, greedy: list[int]) -> GoldenReport:
    tokens = case["input_ids"]
    hidden_NH = torch.cat([rows for _, rows in forced.hidden(tokens)])
    last_V = forced.model.logits(hidden_NH[-1:])[0].cpu()
    equal = _leading_equal(greedy, case["greedy"])
    drafts_equal, drafts_total = _drafts(forced, hidden_NH, case)
    return GoldenReport(
        name=case["name"],
        logit_difference=(last_V - logits_V).abs().max().item(),
        nll_difference=float(np.abs(token_nll(forced, tokens) - np.array(case["nll"])).max()),
        greedy_equal=equal,
        greedy_total=len(case["greedy"]),
        margin=case["greedy_margin"][equal] if equal < len(case["greedy"]) else None,
        drafts_equal=drafts_equal,
        drafts_total=drafts_total,
    )


def _leading_equal(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))


def _drafts(forced: Forced, hidden_NH: Tensor, case: dict[str, Any]) -> tuple[int, int]:
    """The last pair takes the first greedy token as the token that follows."""
    if forced.model.weights.mtp is None:
        return 0, 0
    following = torch.tensor([*case["input_ids"][1:], case["greedy"][0]], device=hidden_NH.device)
    drafts = forced.model.logits(draft_hidden(forced.model, following, hidden_NH)).argmax(-1).tolist()
    return sum(a == b for a, b in zip(drafts, case["mtp_draft"], strict=True)), len(drafts)
