"""A request's sampling fields, checked against the model and completed with its defaults."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from kakera.contract.request import Constraint, Sampling, ThinkingBudget
from kakera.errors import CONTEXT_LENGTH_EXCEEDED, RequestRefused, prompt_too_long
from kakera.run.interface import EngineLimits
from kakera.server.model import ServedModel
from kakera.server.openai.schema import GenerationBody

TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
COUNTED = 524_288  # tokens of a text that is only counted, if the context is not larger; as JSON 4 MB
COUNTED_BEYOND = 4  # a quarter of the context


def build_sampling(
    body: GenerationBody,
    model: ServedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    thinking: ThinkingBudget | None = None,
) -> Sampling:
    """Raises RequestRefused naming the field whose token ids the model does not have."""
    defaults = model.defaults

    def chosen(name: str) -> float:
        value: float | None = getattr(body, name)
        return float(getattr(defaults, name)) if value is None else value

    stop_ids = tuple(body.stop_token_ids or ())
    for token in stop_ids:
        check_token(token, model, "stop_token_ids")
    end = () if body.ignore_eos else model.eos
    return Sampling(
        max_tokens=max_tokens,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        temperature=chosen("temperature"),
        top_p=chosen("top_p"),
        top_k=max(0, int(chosen("top_k"))),
        min_p=chosen("min_p"),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=chosen("repetition_penalty"),
        logit_bias=_logit_bias(body.logit_bias or {}, model),
        min_tokens=_min_tokens(body.min_tokens or 0, max_tokens),
        stop_token_ids=tuple(dict.fromkeys((*end, *stop_ids))),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        thinking=thinking,
        # who does not let the model end wants all tokens, whatever they are
        loop_guard=not body.ignore_eos if body.loop_guard is None else body.loop_guard,
    )


def completion_room(prompt_tokens: int, wanted: int | None, limits: EngineLimits, param: str) -> int:
    """Tokens that may be generated: what is wanted, cut to the context. Raises RequestRefused if there is no room."""
    room = limits.context - prompt_tokens
    if room < 1:
        raise prompt_too_long(prompt_tokens, limits.context, param)
    return room if wanted is None else min(wanted, room)


def prompt_check(limits: EngineLimits, param: str) -> Callable[[int], None]:
    """To be asked while a prompt is made: raises RequestRefused for so many tokens that the rest need not be counted.
    A prompt that is a little too long is counted to its end: clients shorten it by the number that they are told."""

    def check(tokens: int) -> None:
        if tokens > limits.context + limits.context // COUNTED_BEYOND:
            raise prompt_too_long(tokens, limits.context, param, at_least=True)

    return check


def count_check(limits: EngineLimits, param: str) -> Callable[[int], None]:
    """The same for what is only counted, which may be longer than a prompt."""
    most = max(COUNTED, limits.context)

    def check(tokens: int) -> None:
        if tokens > most:
            message = f"{param} has at least {tokens} tokens and at most {most} are counted in one request; send less"
            raise RequestRefused(message, code=CONTEXT_LENGTH_EXCEEDED, param=param)

    return check


def _min_tokens(wanted: int, max_tokens: int) -> int:
    if wanted > max_tokens:
        raise RequestRefused(f"min_tokens is {wanted} but only {max_tokens} may be generated", param="min_tokens")
    return wanted


def _logit_bias(bias: dict[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        if not TOKEN_ID.fullmatch(key):  # "007" would be a second value for "7"
            raise RequestRefused(
                f"logit_bias: {key[:40]!r} is not a token id, which is a number such as 7 in the digits 0 to 9",
                param="logit_bias",
            )
        pairs[check_token(int(key), model, "logit_bias")] = value
    return tuple(pairs.items())


def check_token(token: int, model: ServedModel, param: str) -> int:
    """Raises RequestRefused for an id that the model does not have."""
    if token >= model.vocab:
        raise RequestRefused(f"{param}: token id {token} is outside the vocabulary of {model.vocab}", param=param)
    return token
