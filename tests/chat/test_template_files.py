"""A chat template is found wherever a checkpoint keeps it, in transformers' order; one for tools goes with tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kakera.chat.template import ChatTemplate
from kakera.chat.template_files import find_templates
from kakera.errors import CheckpointError
from kakera.text.tokenizer import Tokenizer
from tiny_model import byte_tokenizer

JINJA, CONFIG, OLD, MORE = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "chat_template.json",
    "additional_chat_templates/",
)
NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        text = content if name.endswith(".jinja") else json.dumps({"chat_template": content})
        path.write_text(text, encoding="utf-8-sig" if "bom" in str(content) else "utf-8")
    return directory


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, {}),
        ({CONFIG: None}, {}),
        ({CONFIG: "C"}, {"default": "C"}),
        ({JINJA: "J", CONFIG: "C", OLD: "O"}, {"default": "J"}),
        ({CONFIG: "C", OLD: "O"}, {"default": "C"}),
        ({OLD: "O"}, {"default": "O"}),
        ({CONFIG: None, OLD: "O"}, {"default": "O"}),
        ({CONFIG: NAMED}, {"default": "D", "tool_use": "T", "rag": "R"}),
        ({CONFIG: {"default": "D", "tool_use": "T"}}, {"default": "D", "tool_use": "T"}),
        ({OLD: NAMED[:2]}, {"default": "D", "tool_use": "T"}),
        ({JINJA: "J", CONFIG: NAMED}, {"default": "J"}),  # files take the place of all that the config names
        ({JINJA: "J", MORE + "tool_use.jinja": "M", CONFIG: NAMED}, {"default": "J", "tool_use": "M"}),
        ({MORE + "tool_use.jinja": "M", CONFIG: "C"}, {"default": "C", "tool_use": "M"}),
        ({JINJA: "bom", CONFIG: "bom, too"}, {"default": "bom"}),
        ({OLD: "bom"}, {"default": "bom"}),
        ({JINJA: "a\r\nb"}, {"default": "a\nb"}),
    ],
    ids=str,
)
def test_templates_are_found_in_order(tmp_path, files, found):
    assert find_templates(write(tmp_path, files)) == found


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({CONFIG: NAMED[1:]}, "templates named rag, tool_use and none named default"),
        ({MORE + "rag.jinja": "R"}, "templates named rag and none named default"),
        ({CONFIG: 5}, "tokenizer_config.json: chat_template is neither"),
        ({CONFIG: ["x"]}, "tokenizer_config.json: chat_template is neither"),
        ({CONFIG: [{"name": "default"}]}, "chat_template is neither"),
        ({CONFIG: [{"template": "x"}]}, "chat_template is neither"),
        ({OLD: {"default": 5}}, "chat_template.json: chat_template is neither"),
    ],
    ids=str,
)
def test_what_is_no_template_is_refused_in_words(tmp_path, files, words):
    with pytest.raises(CheckpointError, match=words):
        find_templates(write(tmp_path, files))


def test_requests_with_tools_have_the_template_for_them(tmp_path):
    write(tmp_path, {CONFIG: [{**NAMED[0], "template": "plain"}, {**NAMED[1], "template": "{{ tools[0].name }}"}]})
    tokenizer = Tokenizer(byte_tokenizer())
    template = ChatTemplate.load(tmp_path, tokenizer)
    messages = [{"role": "user", "content": "a"}]
    texts = [tokenizer.decode(template.prompt(messages, tools).tokens) for tools in (None, [], [{"name": "weather"}])]
    assert texts == ["plain", "plain", "weather"]


def test_a_turn_ends_at_every_end_token_that_the_template_writes(tmp_path):
    """Also where the tokenizer's own end token is the end of a text, as base tokenizers have it."""
    tokenizer = Tokenizer(byte_tokenizer(), "<|endoftext|>")
    source = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}<think>"
    end = tokenizer.added["<|im_end|>"].id
    messages = [{"role": role, "content": "abc"} for role in ("user", "assistant", "user")]
    prompt = ChatTemplate(source, tokenizer, (end,)).prompt(messages)
    assert [boundary.position for boundary in prompt.boundaries] == [6, 12, 18, 19] and prompt.opens_thinking
    assert len(ChatTemplate(source, tokenizer).prompt(messages).boundaries) == 1
