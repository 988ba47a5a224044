"""What the agents' dialects share: a body of theirs as a chat body, and that as a job."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from kakera.chat.template import Prompt
from kakera.errors import RequestRefused
from kakera.server.choice import Job
from kakera.server.fields import RequestBody
from kakera.server.http.errors import explain
from kakera.server.openai.chat import chat_job, chat_prompt
from kakera.server.openai.sampling import count_check
from kakera.server.openai.schema import ChatBody
from kakera.server.service import Service

Names = Mapping[str, str]


def chat_body(fields: dict[str, Any], names: Names, passed_on: Mapping[str, Any]) -> ChatBody:
    """Fields without a value are left out; those `passed_on` are chat's already. Raises RequestRefused naming the field
    as the dialect calls it."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in passed_on.items():
        if value is not None and name in given:
            raise RequestRefused(f"{name} and {names.get(name, name)} say the same; send one", param=name)
        given[name] = value
    try:
        return ChatBody.model_validate(given)
    except ValidationError as error:
        located = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        param, message = explain(located)
        raise renamed(RequestRefused(message, param=param), names) from None


def names_of(body: RequestBody, names: Names) -> Names:
    """How this body calls the fields of a chat: those that it passes on keep their names."""
    return {theirs: ours for theirs, ours in names.items() if theirs not in body.passed_on}


def renamed(error: RequestRefused, names: Names) -> RequestRefused:
    """The same refusal with the field named as the dialect calls it."""
    theirs = (error.param or "").partition("[")[0].partition(".")[0]
    if theirs not in names:
        return error
    ours, message = names[theirs], str(error)
    if message.startswith(theirs):
        message = ours + message.removeprefix(theirs)
    return RequestRefused(message, status=error.status, code=error.code, param=ours)


async def dialect_job(body: ChatBody, service: Service, prefix: str, names: Names) -> Job:
    """The job of a chat body, with an id as the dialect writes it. Raises RequestRefused."""
    try:
        return replace(await chat_job(body, service), id=f"{prefix}_{uuid.uuid4().hex}")
    except RequestRefused as error:
        raise renamed(error, names) from None


async def dialect_prompt(body: ChatBody, service: Service) -> Prompt:
    """The prompt that a chat body makes, to be looked at only. Raises RequestRefused."""
    prompt, _ = await chat_prompt(body, service, count_check(service.engine.limits, "messages"))
    return prompt


def string(item: dict[str, Any], name: str, path: str) -> str:
    """A field that must be there and be a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestRefused(f"{path}.{name} must be a string", param=f"{path}.{name}")
    return value
