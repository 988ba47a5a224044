"""Images in every dialect: where they land in the prompt, what is counted, and what is refused in words."""

from __future__ import annotations

import base64
import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, start
from PIL import Image

import kakera.vision.picture
from kakera.arch.registry import load_spec
from kakera.server.model import ServedModel
from kakera.vision.picture import picture
from lazily import lazily
from seeing_model import END, IMAGE, START

anthropic, openai = lazily("anthropic"), lazily("openai")
TEXT = {"type": "text", "text": "what?"}
HELLO = [{"text": "Hello."}]


def png(colour: str = "red", size: tuple[int, int] = (48, 32)) -> str:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


RED, BLUE = png("red"), png("blue", (24, 40))
URL = f"data:image/png;base64,{RED}"
OF_URL = {"type": "image_url", "image_url": {"url": URL}}
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}}
OTHER = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BLUE}}


@pytest.fixture(scope="module")
def seeing(seeing_model: Path) -> ServedModel:
    vision = load_spec(seeing_model).vision
    assert vision is not None
    return ServedModel.load(seeing_model, "mini").seeing(vision, seeing_model, 256)


@pytest.fixture(scope="module")
def live(seeing: ServedModel, tmp_path_factory: pytest.TempPathFactory):
    with start(seeing, tmp_path_factory.mktemp("images") / "script.json", HELLO) as server:
        yield server


def asked(live: Live) -> tuple[str, list[tuple[int, int, bytes]]]:
    """The last prompt as text, images as [rows x columns], and these."""
    request = live.engine.requests[-1]
    tokens, text, at = list(request.tokens), "", 0
    for image in request.images:
        assert tokens[image.start - 1] == START and tokens[image.end] == END
        assert set(tokens[image.start : image.end]) == {IMAGE}
        text += live.model.tokenizer.decode(tokens[at : image.start - 1]) + f"[{image.rows} x {image.columns}]"
        at = image.end + 1
    text += live.model.tokenizer.decode(tokens[at:])
    return text, [(image.rows, image.columns, image.digest) for image in request.images]


def chat(live: Live, *content: Any, before: list[dict] | None = None, role: str = "user", **more: Any):
    messages = [*(before or []), {"role": role, "content": list(content)}]
    return live.post("/v1/chat/completions", model="mini", messages=messages, max_tokens=4, **more)


def messages(live: Live, *content: Any, before: list[dict] | None = None, **more: Any):
    said = [*(before or []), {"role": "user", "content": list(content)}]
    return live.post("/v1/messages", model="mini", messages=said, max_tokens=4, **more)


def responses(live: Live, *items: Any, **more: Any):
    return live.post("/v1/responses", model="mini", input=list(items), max_output_tokens=4, **more)


def test_every_spelling_is_the_same_image(live):
    spelled = [
        OF_URL,
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "image", "image": URL},
        {"type": "image", "url": f"data:,{''.join(f'%{byte:02x}' for byte in base64.b64decode(RED))}"},
        SOURCE,
        {"type": "image", "source": {"type": "url", "url": URL}},
    ]
    found = []
    for part in spelled:
        assert chat(live, part, TEXT).status_code == 200, part
        found.append(asked(live))
    assert found == found[:1] * len(spelled)
    text, images = found[0]
    assert text == "<|im_start|>user\n[4 x 6]what?<|im_end|>\n<|im_start|>assistant\n"
    assert images == [(4, 6, picture(base64.b64decode(RED), live.model.images.pixels).digest)]


def test_images_stand_where_they_were_sent_in_the_order_of_the_messages(live):
    before = [{"role": "user", "content": [TEXT, OF_URL]}, {"role": "assistant", "content": "Red."}]
    assert chat(live, OTHER, {"type": "text", "text": " and "}, OF_URL, OTHER, before=before).status_code == 200
    text, images = asked(live)
    assert text == (
        "<|im_start|>user\nwhat?[4 x 6]<|im_end|>\n<|im_start|>assistant\nRed.<|im_end|>\n"
        "<|im_start|>user\n[5 x 3] and [4 x 6][5 x 3]<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [images[0][2], images[1][2]] == [images[2][2], images[3][2]] and images[0] != images[1]


def test_a_spelled_placeholder_stays_text(live):
    """In words of users, tools and the model; public bugs of engines that count tokens by their ids."""
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    before = [{"role": "assistant", "content": spelled}, {"role": "tool", "content": spelled}]
    assert chat(live, {"type": "text", "text": spelled}, OF_URL, before=before).status_code == 200
    text, images = asked(live)
    assert len(images) == 1 and text.count(spelled) == 3
    assert list(live.engine.requests[-1].tokens).count(IMAGE) == 24


def test_text_alone_makes_the_prompt_that_it_makes_without_a_tower(live, seeing_model):
    """A list of texts, too, and a boundary where it was."""
    blind = ServedModel.load(seeing_model, "mini")
    for content in ("hi", [TEXT, {"type": "text", "text": "!"}], None, []):
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        ours = live.model.template.prompt(said, sight=live.model.images.look)
        theirs = blind.template.prompt(said)
        assert (ours.tokens, ours.boundaries, ours.images) == (theirs.tokens, theirs.boundaries, ())


def test_results_of_tools_hold_images_in_every_dialect(live):
    """Public bug 22: Claude Code reads pictures so; turned into text or dropped, with status 200."""
    called = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    before = [{"role": "user", "content": "look"}, {"role": "assistant", "content": None, "tool_calls": [called]}]
    assert chat(live, TEXT, OF_URL, before=before, role="tool").status_code == 200
    assert asked(live)[0].endswith("<|im_start|>tool\nwhat?[4 x 6]<|im_end|>\n<|im_start|>assistant\n")
    use = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
    history = [{"role": "user", "content": "look"}, {"role": "assistant", "content": [use]}]
    for is_error, said in ((False, ""), (True, "Error: ")):
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [SOURCE, TEXT], "is_error": is_error}
        assert messages(live, result, TEXT, OTHER, before=history).status_code == 200
        text, images = asked(live)
        assert f"<|im_start|>tool\n{said}[4 x 6]what?<|im_end|>\n<|im_start|>user\nwhat?[5 x 3]<|im_end|>" in text
        assert len(images) == 2
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "seen"}]
    done = {"type": "function_call_output", "call_id": "c1", "output": output}
    assert responses(live, {"role": "user", "content": "look"}, call, done).status_code == 200
    assert "<|im_start|>tool\n[4 x 6]seen<|im_end|>" in asked(live)[0]
    shot = {
        "type": "computer_call_output",
        "call_id": "c2",
        "output": {"type": "computer_screenshot", "image_url": URL},
    }
    acted = {"type": "computer_call", "call_id": "c2", "action": {"type": "screenshot"}}
    assert responses(live, {"role": "user", "content": "look"}, acted, shot).status_code == 200
    assert "<|im_start|>tool\n[4 x 6]<|im_end|>" in asked(live)[0]


def test_the_clients_of_both_dialects(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        said = [{"role": "user", "content": [TEXT, OF_URL]}]
        found = client.chat.completions.create(model="mini", messages=said, max_tokens=4)
        told = client.responses.create(
            model="mini",
            input=[{"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}],
        )
    assert found.usage.prompt_tokens_details.image_tokens == 24 and told.usage.input_tokens > 24
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        said = [{"role": "user", "content": [SOURCE, TEXT]}]
        assert client.messages.create(model="mini", messages=said, max_tokens=4).usage.input_tokens > 24
        counted = client.messages.count_tokens(model="mini", messages=said)
    assert counted.input_tokens == len(live.engine.requests[-1].tokens)


def test_counting_decodes_nothing(live, monkeypatch):
    """count_tokens, /tokenize and /render read the header alone."""
    monkeypatch.setattr(kakera.vision.picture, "decoded", None)
    fresh = {"type": "image_url", "image_url": {"url": f"data:;base64,{png('green', (80, 120))}"}}
    said = [{"role": "user", "content": [TEXT, fresh]}]
    tokens = live.post("/tokenize", model="mini", messages=said).json()
    assert tokens["tokens"].count(IMAGE) == 150 and tokens["count"] == len(tokens["tokens"])
    rendered = live.post("/v1/chat/completions/render", model="mini", messages=said).json()
    assert rendered["token_ids"] == tokens["tokens"]
    source = {"type": "base64", "media_type": "image/png", "data": png("green", (80, 120))}
    said = [{"role": "user", "content": [TEXT, {"type": "image", "source": source}]}]
    assert live.post("/v1/messages/count_tokens", model="mini", messages=said).json()["input_tokens"] > 150


def test_large_images_are_scaled_down_and_little_is_taken_of_low_detail(live):
    url = f"data:;base64,{png('red', (800, 600))}"
    assert chat(live, {"type": "image_url", "image_url": url}).status_code == 200
    (((rows, columns, digest),)) = asked(live)[1]
    assert 200 < rows * columns <= 256
    assert chat(live, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}).status_code == 200
    assert asked(live)[1] == [(rows, columns, digest)]  # this server's largest image is of low detail


def test_models_say_that_they_read_images(live):
    (model,) = live.http.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image"]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "http": ({"url": "http://169.254.169.254/latest/meta-data"}, "http URLs are not fetched"),
    "https": ({"url": "https://example.com/a.png"}, "send the image itself as a data URL"),
    "file": ({"url": "file:///etc/passwd"}, "file URLs are not fetched"),
    "base64": ({"url": "data:image/png;base64,@@@"}, "not valid base64"),
    "nothing": ({"url": "data:image/png;base64,"}, "0 bytes"),
    "no image": ({"url": f"data:image/png;base64,{base64.b64encode(b'hello').decode()}"}, "no format that is read"),
    "cut": ({"url": f"data:image/png;base64,{RED[: len(RED) // 2]}"}, "can not be decoded|not valid base64"),
    "no url": ({}, "holds no image"),
    "a number": ({"url": 3}, "holds no image"),
    "detail": ({"url": URL, "detail": "blurred"}, "detail is 'blurred'"),
    "bytes alone": ({"url": RED}, r"such URLs are not fetched: send .* \(data:image/png;base64,...\)$"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_image_is_a_400_that_names_it_and_the_next_request_is_unharmed(live, name):
    """Public bugs 7, 23 and 24. In a chat as the third part of the second message, and as Anthropic has it."""
    broken, said = BROKEN[name]
    count = len(live.engine.requests)
    before = [{"role": "assistant", "content": "hm"}]
    error = chat(live, TEXT, OF_URL, {"type": "image_url", "image_url": broken}, before=before)
    assert error.status_code == 400
    told = error.json()["error"]
    assert told["param"] == "messages[1].content[2]" and told["message"].startswith("messages[1].content[2]")
    assert re.search(said, told["message"]), told
    if "url" in broken and isinstance(broken["url"], str) and name != "detail":
        inside = [{"type": "image", "source": {"type": "url", "url": broken["url"]}}]
        result = {"type": "tool_result", "tool_use_id": "a", "content": inside}
        error = messages(live, TEXT, result, before=before)
        assert error.status_code == 400
        assert "messages[1].content[1].content[0]" in error.json()["error"]["message"]
        error = responses(live, {"role": "user", "content": [{"type": "input_image", "image_url": broken["url"]}]})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "input[0].content[0]")
    assert len(live.engine.requests) == count and chat(live, TEXT, OF_URL).status_code == 200


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            lambda live: chat(live, OF_URL, role="system"),
            r"messages\[0\].content\[0\] is an image in a m",
        ),
        (lambda live: chat(live, TEXT, OF_URL, role="assistant"), "in a message of the assistant"),
        (lambda live: messages(live, TEXT, system=[SOURCE]), "system"),
        (lambda live: messages(live, TEXT, before=[{"role": "assistant", "content": [SOURCE]}]), "of the assistant"),
        (lambda live: responses(live, {"role": "developer", "content": [OF_URL]}), "of the developer"),
        (lambda live: responses(live, {"role": "assistant", "content": [OF_URL]}), "of the assistant"),
        (lambda live: messages(live, {"type": "image", "source": {"type": "file", "file_id": "f"}}), "type 'file'"),
        (
            lambda live: responses(live, {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}),
            "files are not kept here",
        ),
        (lambda live: chat(live, *[OF_URL] * 65), r"messages\[0\].content\[64\] is image 65"),
        (
            lambda live: chat(live, {"type": "video_url", "video_url": {"url": URL}}),
            "video_url.*reads no documents, au",
        ),
    ],
)
def test_images_where_they_have_no_place(live, error, said):
    found = error(live)
    assert found.status_code == 400 and re.search(said, found.json()["error"]["message"]), found.text


@pytest.mark.parametrize("kind", ["image", "image_url"])
@pytest.mark.parametrize(
    "more",
    [{"at": "messages[9]"}, {"at": "x", "low": "y"}, {"at": 1, "low": True}, {"at": "x", "low": True, "text": "hey"}],
    ids=str,
)
def test_no_part_passes_for_one_that_has_been_read(live, kind, more):
    """Fields that the server itself uses, sent by a client."""
    part = {"type": kind, "url": URL, **more}
    for found in (chat(live, part), messages(live, part), responses(live, {"role": "user", "content": [part]})):
        assert found.status_code == 200 and len(asked(live)[1]) == 1, found.text
    broken = chat(live, {"type": kind, "url": 5, **more}).json()["error"]
    assert broken["param"] == "messages[0].content[0]" and "holds no image" in broken["message"]


def test_text_never_waits_for_images(live, monkeypatch):
    """A file of 200 bytes may be 50 million pixels, and a host may take its time: a second of work each."""
    at_work, go_on = threading.Semaphore(0), threading.Event()
    see = live.model.images.look

    def slowly(url: str, low: bool) -> Any:
        at_work.release()
        assert go_on.wait(60)
        return see(url, low)

    monkeypatch.setattr(live.model.images, "look", slowly)
    with ThreadPoolExecutor(40) as clients:  # more than a loop has threads
        asks = [
            lambda: chat(live, OF_URL),
            lambda: chat(live, OF_URL, role="tool"),
            lambda: messages(live, SOURCE),
            lambda: responses(live, {"role": "user", "content": [{"type": "input_image", "image_url": URL}]}),
        ]
        found = [clients.submit(asks[i % len(asks)]) for i in range(40)]
        assert at_work.acquire(timeout=60)
        assert chat(live, TEXT).status_code == 200 and not any(each.done() for each in found)
        go_on.set()
        assert {each.result().status_code for each in found} <= {200, 429}


def test_a_prompt_too_long_by_its_images_says_so_as_for_text(live):
    large = {"type": "image_url", "image_url": f"data:;base64,{png('red', (128, 128))}"}  # 256 tokens
    found = chat(live, *[large] * 17, TEXT)
    assert found.status_code == 400 and found.json()["error"]["code"] == "context_length_exceeded"


def test_a_text_model_refuses_images_that_are_asked_now(model, tmp_path):
    """Public bug 25: dropped on one dialect."""
    with start(model, tmp_path / "script.json", HELLO) as blind:
        for found in (
            chat(blind, TEXT, OF_URL),
            messages(blind, TEXT, SOURCE),
            responses(blind, {"role": "user", "content": [{"type": "input_image", "image_url": URL}]}),
        ):
            assert found.status_code == 400 and "reads text only" in found.json()["error"]["message"], found.text
        assert "input_modalities" not in blind.http.get("/v1/models").json()["data"][0]
