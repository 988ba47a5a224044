"""Prompts as transformers renders and tokenises them, with boundaries that later turns share."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kakera
from kakera.chat.template import ChatTemplate
from kakera.errors import CheckpointError, RequestRefused
from kakera.text.tokenizer import Tokenizer

MINI = Path(kakera.__file__).parent / "data" / "mini"
tokenizer = Tokenizer.load(MINI)
template = ChatTemplate.load(MINI, tokenizer)
assert template is not None

TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Wetter für <Städte> & so", "parameters": {}}}
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "reasoning_content": "A call.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "Rain, then sun."},
    {"role": "user", "content": "Thanks 😀"},
]


def render(messages, tools=None, **variables):
    return template.prompt(messages, tools, variables)


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(MINI)


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, len(CONVERSATION) + 1))
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("thinking", [True, False])
def test_tokens_are_those_of_transformers(reference, length, tools, thinking):
    messages = CONVERSATION[:length]
    wanted = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, enable_thinking=thinking, return_dict=True
    )
    assert list(render(messages, tools, enable_thinking=thinking).tokens) == list(wanted["input_ids"])


words = st.one_of(
    st.text(max_size=20), st.sampled_from([*tokenizer.added, "<", "|im_end|>", "\ufdd0", "<|im_<|im_end|>end|>"])
)
contents = st.lists(words, max_size=4).map("".join)


@settings(max_examples=75)
@given(contents, contents)
def test_no_text_of_a_user_becomes_a_control_token(system, user):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    tokens = render(messages, enable_thinking=False).tokens
    plain = render(
        [{"role": "system", "content": "x" if system.strip() else ""}, {"role": "user", "content": "x"}],
        enable_thinking=False,
    ).tokens
    added = {token.id for token in tokenizer.added.values()}
    assert [t for t in tokens if t in added] == [t for t in plain if t in added]
    assert tokenizer.decode(tokenizer.encode(user.strip())) in tokenizer.decode(tokens)


def test_every_kind_of_client_text_is_covered():
    spelled = "<|im_end|>"
    messages = [
        {"role": "user", "content": spelled},
        {
            "role": "assistant",
            "content": spelled,
            "tool_calls": [{"function": {"name": "f", "arguments": {spelled: spelled}}}],
        },
        {"role": "tool", "content": spelled},
    ]
    tools = [{"type": "function", "function": {"name": spelled, "description": spelled}}]
    end = tokenizer.added[spelled].id
    assert template.prompt(messages, tools).tokens.count(end) == 4  # tools, user, assistant, tool


def test_variables_of_the_request_can_spell_nothing_and_replace_nothing():
    echo = ChatTemplate("{{ note }}{{ messages[0].content }}", tokenizer)
    prompt = echo.prompt([{"role": "user", "content": "a"}], None, {"note": "<|im_end|>", "messages": []})
    assert tokenizer.eos not in prompt.tokens and tokenizer.decode(prompt.tokens) == "<|im_end|>a"


def test_boundaries_are_where_turns_begin():
    prompt = render(CONVERSATION, TOOLS, enable_thinking=False)
    start = tokenizer.added["<|im_start|>"].id
    assert [b.kind for b in prompt.boundaries] == ["system", *["message"] * 5, "prompt"]
    assert all(prompt.tokens[b.position] == start for b in prompt.boundaries[:-1])
    assert prompt.boundaries[-1].position == len(prompt.tokens)


def test_without_system_or_tools_the_first_boundary_is_a_message():
    prompt = template.prompt([{"role": "user", "content": "a"}])
    assert [b.kind for b in prompt.boundaries] == ["message", "prompt"]


def test_the_next_turn_begins_with_the_tokens_up_to_a_boundary():
    now = render(CONVERSATION[:2], enable_thinking=False)
    later = render(CONVERSATION, enable_thinking=False)
    end = now.boundaries[-2].position
    assert end > 0 and now.tokens[:end] == later.tokens[:end]


def test_an_open_think_tag_is_seen():
    user = [{"role": "user", "content": "<think>"}]
    assert template.prompt(user).opens_thinking
    assert not render(user, enable_thinking=False).opens_thinking


@pytest.mark.parametrize("messages", [[{"role": "system", "content": ""}], [{"role": "assistant", "content": "a"}]])
def test_lists_without_a_user_render(messages):
    assert template.prompt(messages).tokens


LATE = [{"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
HEAD = "{% for m in messages %}"
TAIL = "[{{ m.role }}:{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (HEAD + TAIL, "[user:hi][system:Be brief.][user:x]"),
        (
            HEAD + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}" + TAIL,
            "tagged",
        ),
        (HEAD + "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}" + TAIL, "tagged"),
        (
            "{% for m in messages if m.role == 'system' %}"
            + TAIL
            + "{% for m in messages if m.role != 'system' %}"
            + TAIL,
            "tagged",
        ),
    ],
)
def test_a_late_system_message_is_what_the_template_knows(source, text):
    tagged = "[user:hi][user:<system-reminder>\nBe brief.\n</system-reminder>][user:x]"
    prompt = ChatTemplate(source, tokenizer).prompt(LATE)
    assert tokenizer.decode(prompt.tokens) == (tagged if text == "tagged" else text)


def test_a_late_system_message_leaves_the_prefix_as_it_was():
    before, after = template.prompt(CONVERSATION), template.prompt([*CONVERSATION, *LATE[1:]])
    shared = before.boundaries[-2].position
    assert after.tokens[:shared] == before.tokens[:shared] and before.boundaries[:-1] == after.boundaries[:6]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in tokenizer.decode(after.tokens[shared:])
    assert template.prompt(LATE).boundaries[0].kind == "message"


def test_a_template_that_refuses_is_a_400_about_the_messages():
    strict = ChatTemplate("{{ raise_exception('No user query found') }}", tokenizer)
    with pytest.raises(RequestRefused, match="No user query found") as refusal:
        strict.prompt([{"role": "system", "content": "a"}])
    assert refusal.value.param == "messages"


NEEDS_A_USER = """{%- set ns = namespace(query=false) -%}{%- for m in messages[::-1] -%}
{%- if m.role == 'user' -%}{%- set ns.query = true -%}{%- endif -%}
{%- endfor -%}{%- if not ns.query -%}{{- raise_exception('No user query found in messages.') -}}{%- endif -%}
{%- for m in messages -%}{{- m.role + ': ' + m.content + '. ' -}}{%- endfor -%}"""
ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "s"}]])
@pytest.mark.parametrize("rest", [[ANSWER], [ANSWER, {"role": "tool", "content": "t"}]])
def test_a_template_that_needs_a_user_gets_a_stand_in_where_a_compaction_left_none(system, rest):
    """Qwen3.5's own template raises so."""
    needing = ChatTemplate(NEEDS_A_USER, tokenizer)
    text = tokenizer.decode(needing.prompt([*system, *rest]).tokens)
    assert text.startswith("system: s. user: Continue.. " if system else "user: Continue.. ") and "a." in text
    text = tokenizer.decode(needing.prompt([*system, {"role": "user", "content": "hi"}, *rest]).tokens)
    assert "Continue." not in text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "a"),
        ("{{ {'ü': '<&>'} | tojson }}", '{"ü": "<&>"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ bos }}{{ messages[0].content }}", "a"),
    ],
)
def test_what_templates_may_use(source, text):
    prompt = ChatTemplate(source, tokenizer).prompt(
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    )
    assert tokenizer.decode(prompt.tokens) == text


def test_templates_can_not_reach_python():
    evil = ChatTemplate("{{ messages.__class__.__mro__ }}", tokenizer)
    with pytest.raises(RequestRefused):
        evil.prompt([{"role": "user", "content": "a"}])


def test_a_broken_template_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% if %}", tokenizer)


def test_a_long_conversation_is_not_tokenised_again(monkeypatch):
    fresh = Tokenizer.load(MINI)
    chat = ChatTemplate.load(MINI, fresh)
    messages = [{"role": "user", "content": "word " * 1000}]
    chat.prompt(messages)
    seen: list[str] = []
    bpe = fresh._bpe
    monkeypatch.setattr(
        fresh,
        "_bpe",
        type("Spy", (), {"encode_batch_fast": lambda self, t, **k: seen.extend(t) or bpe.encode_batch_fast(t, **k)})(),
    )
    chat.prompt([*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}])
    assert seen and all(len(text) < 100 for text in seen)
