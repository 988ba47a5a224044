"""What the routes answer, as /openapi.json says it.

Every shape is closed: what an answer has, its shape names. A test holds the answers of a running server to them.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from kakera.schedule.request import Active
from kakera.server.sensors import CardReading

Responses = dict[int | str, dict[str, Any]]
closed = with_config(ConfigDict(extra="forbid", protected_namespaces=()))


@closed
class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@closed
class ErrorAnswer(TypedDict):
    error: ErrorFields


@closed
class AnthropicErrorFields(TypedDict):
    type: str
    message: str
    param: NotRequired[str]


@closed
class AnthropicErrorAnswer(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorFields


@closed
class CachedTokens(TypedDict):
    cached_tokens: int


@closed
class ReasoningTokens(TypedDict):
    reasoning_tokens: int


@closed
class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


@closed
class ChatUsage(CompletionUsage):
    completion_tokens_details: ReasoningTokens


@closed
class CalledFunction(TypedDict):
    name: str
    arguments: str


@closed
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@closed
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@closed
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@closed
class ChosenTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


@closed
class ChatLogprobs(TypedDict):
    content: list[ChosenTokenLogprob]
    refusal: None


@closed
class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


@closed
class ChatAnswer(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


@closed
class TextLogprobs(TypedDict):
    """Lists of the same length, an entry a token. The first token of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@closed
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


@closed
class CompletionAnswer(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


@closed
class ThinkingTokens(TypedDict):
    thinking_tokens: int


@closed
class MessageUsage(TypedDict):
    """The three kinds of input tokens add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


@closed
class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


@closed
class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


@closed
class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@closed
class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


@closed
class TokenCount(TypedDict):
    input_tokens: int


@closed
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@closed
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


Status = Literal["in_progress", "completed", "incomplete", "failed"]


@closed
class ReasoningItem(TypedDict):
    id: str
    status: Status
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


@closed
class MessageItem(TypedDict):
    id: str
    status: Status
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


@closed
class FunctionCallItem(TypedDict):
    id: str
    status: Status
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


@closed
class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: Literal[0]


@closed
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


@closed
class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


@closed
class ResponseAnswer(TypedDict):
    """Beside the answer, the request's settings as they are in force."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[ReasoningItem | MessageItem | FunctionCallItem]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None


@closed
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


@closed
class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


@closed
class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


@closed
class Text(TypedDict):
    prompt: str


@closed
class Healthy(TypedDict):
    """`token_seconds` only with `deep`."""

    status: Literal["ok"]
    running: int
    waiting: int
    token_seconds: NotRequired[float]


@closed
class Failing(TypedDict):
    status: Literal["failing"]
    reason: str


@closed
class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    is_generation: Literal[True]
    preferred_sampling_params: None
    max_model_len: int


@closed
class Load(TypedDict):
    dp_rank: Literal[0]
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    max_running_requests: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    utilization: float
    cache_hit_rate: float


@closed
class ServerInfo(TypedDict):
    status: Literal["ready"]
    version: str
    model_path: str
    served_model_name: str
    tp_size: int
    dp_size: Literal[1]
    page_size: int
    context_length: int
    max_running_requests: int
    max_queued_requests: int
    max_total_num_tokens: int
    internal_states: list[Load]


@closed
class LoadSum(TypedDict):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_utilization: float


@closed
class Loads(TypedDict):
    timestamp: str
    version: str
    dp_rank_count: Literal[1]
    loads: list[Load]
    aggregate: LoadSum


@closed
class OldLoad(TypedDict):
    dp_rank: Literal[0]
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


@closed
class FlushAnswer(TypedDict):
    success: Literal[True]
    pages: int
    checkpoints: int
    host_bytes: int


MemoryState = Literal["ok", "near", "over"]


@closed
class MemoryRow(TypedDict):
    """Bytes; `used` is null where nobody counts them."""

    name: str
    note: str
    planned: int
    used: int | None


@closed
class Memory(TypedDict):
    name: str
    capacity: int
    used: int | None
    margin: int
    state: MemoryState
    rows: list[MemoryRow]


@closed
class StatusAnswer(TypedDict):
    """What the page at / polls. It grows with the page."""

    version: str
    model: str
    about: str
    context: int
    uptime_seconds: float
    clock_seconds: float
    warnings: list[str]
    memory: list[Memory]
    resident_bytes: int
    cards: list[CardReading]
    generated_tokens: int
    engine: dict[str, Any]
    active: list[Active]
    finished: list[dict[str, Any]]


def streams(shape: Any, events: str) -> Responses:
    """A whole answer, or with `stream` its events."""
    description = f"The answer; with `stream`: {events}."
    return {200: {"model": shape, "content": {"text/event-stream": {}}, "description": description}}


def refusals(shape: Any) -> Responses:
    return {
        "4XX": {"model": shape, "description": "Refused; the message says which field or limit, and what to do."},
        "5XX": {"model": shape, "description": "The engine failed, hangs, or is stopping."},
    }


ERRORS = refusals(ErrorAnswer)
ANTHROPIC_ERRORS = refusals(AnthropicErrorAnswer)
# of a route whose answers are no JSON; the errors are, all the same
JSON_ERRORS: Responses = {
    status: {
        "description": error["description"],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}},
    }
    for status, error in ERRORS.items()
}
