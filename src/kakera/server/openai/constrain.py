"""A body's wishes about the form of its answer, as the engine's constraint and thinking budget.

Everything is compiled here first, so that what can not be enforced is a 400 before it is queued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kakera.chat.tags import OPEN as CALL_OPEN
from kakera.chat.thinking import CLOSE as THINK_CLOSE
from kakera.chat.thinking import thinking_budget
from kakera.constrain.calls import Usable, calls_rules
from kakera.constrain.formats import Answer, guided, response_format, structured_outputs
from kakera.constrain.lark import grammar
from kakera.contract.request import Constraint, ThinkingBudget
from kakera.errors import RequestRefused
from kakera.server.model import ServedModel
from kakera.server.openai.schema import ChatBody, GenerationBody
from kakera.text.tokenizer import Tokenizer

AFTER_THINKING = r"/\n{1,2}/? "  # what this family's template writes between reasoning and answer
GUIDED = ("json", "regex", "choice", "grammar")


# Of their own: who compiles for a second or two makes wait who asks for a grammar, and nobody who tokenizes.
WORKERS = ThreadPoolExecutor(2, "constrain")
Result = TypeVar("Result")


async def text_constraint(body: GenerationBody, model: ServedModel) -> Constraint | None:
    """Of a text completion. Raises RequestRefused (400) naming the field."""
    return await _apart(lambda: _text_constraint(body, model)) if _asks(body) else None


def _text_constraint(body: GenerationBody, model: ServedModel) -> Constraint | None:
    answer = wanted_answer(body)
    return None if answer is None else _checked(_answer_grammar("", answer), answer.param, False, False, model)


async def chat_constraint(
    body: ChatBody, tools: list[dict[str, Any]], thinks: bool, model: ServedModel
) -> Constraint | None:
    """Of a chat whose prompt shows `tools` and, if `thinks`, ends within reasoning. Raises RequestRefused (400)."""
    return await _apart(lambda: _chat_constraint(body, tools, thinks, model)) if tools or _asks(body) else None


async def _apart(work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(WORKERS, work)


def _asks(body: GenerationBody) -> bool:
    """Whether any field asks for a form."""
    fields = (body.response_format, body.structured_outputs, *(getattr(body, f"guided_{kind}") for kind in GUIDED))
    return any(value is not None for value in fields)


def _chat_constraint(
    body: ChatBody, tools: list[dict[str, Any]], thinks: bool, model: ServedModel
) -> Constraint | None:
    answer = wanted_answer(body)
    must_call = bool(tools) and body.tool_choice not in (None, "auto")
    if answer is None and not tools:
        return None
    if not tools:
        assert answer is not None
        return _checked(_answer_grammar(_lead(thinks), answer), answer.param, thinks, False, model)
    if answer is not None and answer.nested:
        raise RequestRefused(f"{answer.param} can not stand beside tools; use a JSON schema", param=answer.param)
    calls = _usable_calls(body, tools, model)
    if must_call:
        return _checked(grammar(_lead(thinks) + "calls", calls), "tools", thinks, True, model)
    if answer is not None:
        text = grammar(f"{_lead(thinks)}(calls | answer)", calls + answer.rules)
        return _checked(text, answer.param, thinks, True, model)
    at = _token(model.tokenizer, CALL_OPEN)
    if at is not None:
        return Constraint(grammar("calls", calls), at=at, required=False)
    if body.parallel_tool_calls is False or any(tool["function"].get("strict") for tool in tools):
        raise RequestRefused(
            "this model has no token that begins a call, so only tool_choice required can be enforced", param="tools"
        )
    return None


def _answer_grammar(lead: str, answer: Answer) -> str:
    return grammar(lead + "answer", answer.rules, answer.nested)


def _checked(text: str, param: str, thinks: bool, calls: bool, model: ServedModel) -> Constraint:
    """A constraint that begins at once or, behind reasoning, with its end or (if `calls`) with a call inside it."""
    model.compiler.check(text, param)
    if not thinks:
        return Constraint(text)
    after = _token(model.tokenizer, THINK_CLOSE)
    if after is None:
        raise RequestRefused(
            f"{param} can not be enforced behind this model's reasoning, which no token ends; "
            "send chat_template_kwargs with enable_thinking false",
            param=param,
        )
    return Constraint(text, after=after, at=_token(model.tokenizer, CALL_OPEN) if calls else None)


def _usable_calls(body: ChatBody, tools: list[dict[str, Any]], model: ServedModel) -> str:
    """The rules of the calls; only if they do not compile, each schema of a tool that is not strict is tried alone."""
    parallel = body.parallel_tool_calls is not False

    def rules(usable: Usable) -> str:
        text = calls_rules(tools, model.tokenizer, parallel, usable)
        model.compiler.check(grammar("calls", text), "tools")
        return text

    try:
        return rules(lambda rule: True)
    except RequestRefused:
        if all(tool["function"].get("strict") for tool in tools):
            raise
        return rules(lambda rule: model.compiler.compiles(f"start: {rule}"))


def wanted_answer(body: GenerationBody) -> Answer | None:
    """The one form that the body's fields ask for. Raises RequestRefused if there are several."""
    found: list[Answer | None] = []
    if body.response_format is not None:
        found.append(response_format(body.response_format.model_dump(exclude_unset=True)))
    if body.structured_outputs is not None:
        found.append(structured_outputs(body.structured_outputs))
    for kind in GUIDED:
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found.append(guided(kind, value))
    answers = [answer for answer in found if answer is not None]
    if len(answers) > 1:
        fields = " and ".join(answer.param for answer in answers)
        raise RequestRefused(f"{fields} ask for different forms of one answer; send one", param=answers[1].param)
    return answers[0] if answers else None


def budget_of(body: ChatBody, thinks: bool, model: ServedModel) -> ThinkingBudget | None:
    """Raises RequestRefused if the model's reasoning can not be ended."""
    tokens = thinking_budget(body.thinking_budget, body.chat_template_kwargs or {}, body.reasoning_effort)
    if tokens is None or not thinks:
        return None
    end = _token(model.tokenizer, THINK_CLOSE)
    if end is None:
        raise RequestRefused("this model's reasoning has no token that ends it", param="thinking_budget")
    call = _token(model.tokenizer, CALL_OPEN)
    ends = (end,) if call is None else (end, call)
    return ThinkingBudget(tokens, (*model.tokenizer.encode("\n"), end), ends)


def _lead(thinks: bool) -> str:
    return AFTER_THINKING if thinks else ""


def _token(tokenizer: Tokenizer, text: str) -> int | None:
    added = tokenizer.added.get(text)
    return None if added is None else added.id
