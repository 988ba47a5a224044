"""What request bodies are made of. Known fields are checked for type and range; unknown ones are kept, accepted and
logged once (`Service.check`)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
MAX_ITEMS = 20_000  # messages, parts, tools: of 10 tokens and more each, so no context holds so many
MANY = 2**31 - 1  # counts travel to the engine as machine integers

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
T = TypeVar("T")


def _few(pairs: object) -> object:
    """Before its entries are checked, as pydantic counts them last."""
    if isinstance(pairs, dict) and len(pairs) > MAX_ITEMS:
        raise PydanticCustomError("too_long", "Object should have at most {most} fields", {"most": MAX_ITEMS})
    return pairs


# Bodies are checked on the event loop, where a million wrong entries were 40 seconds of errors that nobody reads.
Items = Annotated[list[T], Field(fail_fast=True, max_length=MAX_ITEMS)]
Pairs = Annotated[dict[str, T], BeforeValidator(_few), Field(max_length=MAX_ITEMS)]
Numbers = Annotated[list[T], Field(fail_fast=True)]  # cheap enough that only the body's size bounds them


class Body(BaseModel):
    """Strict: "0.5" is not a number and 1 is not true."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class RequestBody(Body):
    """A whole one. Without `model`, or with "default", the model that is served is meant."""

    passed: ClassVar[frozenset[str]] = frozenset()  # fields of chat completions that the dialect takes as they are
    model: str | None = None

    @property
    def passed_on(self) -> dict[str, Any]:
        return {name: value for name, value in (self.model_extra or {}).items() if name in self.passed}


def refuse(field: str, message: str) -> PydanticCustomError:
    """An error about `field` that only shows when fields are seen together."""
    return PydanticCustomError("field", "{message}", {"message": message, "field": field})
