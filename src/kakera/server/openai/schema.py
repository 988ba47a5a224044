"""Bodies of OpenAI's classic dialects. Ranges are OpenAI's where OpenAI has the field, otherwise those of the common
extensions (vLLM's names)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from kakera.chat.messages import ROLES
from kakera.server.examples import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, shown
from kakera.server.fields import MANY, MAX_STOPS, Body, Items, Numbers, Pairs, RequestBody, StopString, refuse

MAX_CHOICES = 16
MAX_PROMPTS = 2048  # of one body; evaluation tools send hundreds
MAX_ALTERNATIVES = 20
MAX_STOP_IDS = 1024  # each is looked at with each token
SEEDS = 2**63

TokenId = Annotated[int, Field(ge=0)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _few_prompts(prompt: object) -> object:
    """Before its entries are checked, as pydantic counts them last."""
    if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS and isinstance(prompt[0], str | list):
        raise refuse("prompt", f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} fit into one request")
    return prompt


class StreamOptions(Body):
    include_usage: bool | None = None


class ResponseFormat(Body):
    """What each type needs beside it is judged by kakera.constrain.formats."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None


class GenerationBody(RequestBody):
    """What chat and text completions share."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MANY)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)  # logits times 100 are still finite
    logit_bias: Pairs[Bias] | None = None
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[Numbers[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    min_tokens: int | None = Field(None, ge=0)
    return_progress: bool | None = None  # llama.cpp's: a stream's chunks tell how far the prompt is read
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Numbers[str] | None = None
    guided_grammar: str | None = None
    loop_guard: bool | None = None
    cache: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def salt(self) -> bytes:
        return (self.cache_salt or "").encode()

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "stream_options is only allowed when stream is true")
        return self


class Function(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class ChatMessage(Body):
    """Roles and content parts are judged by kakera.chat.messages, which knows what the model can read."""

    role: str = Field(json_schema_extra={"enum": [*ROLES]})
    content: str | Items[Any] | dict[str, Any] | None = None
    tool_calls: Items[Any] | None = None


class Reasoning(Body):
    """OpenRouter's spelling of the wishes about thinking."""

    effort: Effort | None = None
    max_tokens: int | None = Field(None, ge=0, le=MANY)
    enabled: bool | None = None


class Thinking(Body):
    """DeepSeek's and GLM's, after Anthropic's."""

    type: str | None = None
    budget_tokens: int | None = Field(None, ge=0, le=MANY)


class ChatBody(GenerationBody):
    """`functions` and `function_call` are what `tools` and `tool_choice` were called once, and become those."""

    model_config = shown(CHAT)
    # for dialects that have no name of their own for them
    for_agents: ClassVar[frozenset[str]] = frozenset(
        {
            *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed"),
            *("stop", "stop_token_ids", "min_tokens", "ignore_eos", "loop_guard", "chat_template_kwargs", "cache_salt"),
            *("reasoning_effort", "thinking_budget", "response_format", "structured_outputs"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        }
    )

    messages: Items[ChatMessage]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    functions: Items[Function] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    stop_in_thinking: bool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = Field(None, ge=0, le=MANY)
    enable_thinking: bool | str | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def legacy(self) -> bool:
        """Whether calls are expected in the spelling of `functions`."""
        return bool(self.functions)

    @model_validator(mode="after")
    def _functions_are_tools(self) -> ChatBody:
        if self.functions and self.tools:
            raise refuse("functions", "functions is the old name of tools; send one of them")
        if self.functions:
            self.tools = [Tool(type="function", function=function) for function in self.functions]
            self.parallel_tool_calls = False
        choice = self.function_call
        if self.tool_choice is None and choice is not None:
            if isinstance(choice, FunctionName):
                self.tool_choice = NamedToolChoice(type="function", function=choice)
            else:
                self.tool_choice = choice
        return self

    @model_validator(mode="after")
    def _other_spellings_of_thinking(self) -> ChatBody:
        """Dropped, they would change the answer. Our own fields win."""
        theirs: list[tuple[bool, Effort | None, int | None]] = []  # switched off, effort, tokens
        if (reasoning := self.reasoning) is not None:
            theirs.append((reasoning.enabled is False, reasoning.effort, reasoning.max_tokens))
        if (thinking := self.thinking) is not None:
            theirs.append((thinking.type == "disabled", None, thinking.budget_tokens))
        for off, effort, tokens in theirs:
            if self.enable_thinking is None and off:
                self.enable_thinking = False
            if self.reasoning_effort is None:
                self.reasoning_effort = effort
            if self.thinking_budget is None:
                self.thinking_budget = tokens
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "top_logprobs needs logprobs to be true")
        return self


class CompletionBody(GenerationBody):
    model_config = shown(COMPLETIONS)

    prompt: Annotated[str | Numbers[str] | Numbers[TokenId] | Numbers[Numbers[TokenId]], BeforeValidator(_few_prompts)]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: str | None = None
    parse_special: bool | None = None  # without it and with true, spelled control tokens in a prompt are the tokens

    @model_validator(mode="after")
    def _nothing_is_chosen_or_filled_in(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refuse("best_of", "best_of must be n here: all choices are returned; send n for more of them")
        if self.suffix:
            raise refuse(
                "suffix", "suffix is not supported: write the model's own marks for filling in into the prompt"
            )
        return self

    @model_validator(mode="after")
    def _zero_tokens_only_to_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens", "max_tokens must be at least 1 unless echo is true")
        if not self.prompt or (isinstance(self.prompt, list) and any(item in ("", []) for item in self.prompt)):
            raise refuse("prompt", "prompt is empty; send at least one token")
        return self


class TokenizeBody(RequestBody):
    """Either a text or a chat."""

    model_config = shown(TOKENIZE)

    prompt: str | None = None
    messages: Items[ChatMessage] | None = None
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "give either prompt or messages")
        return self


class DetokenizeBody(RequestBody):
    model_config = shown(DETOKENIZE)

    tokens: Numbers[TokenId]
