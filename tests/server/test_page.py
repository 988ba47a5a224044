"""The page in a real browser, headless: what a person would see. Skipped where there is no Chromium or no playwright.

Continuous integration installs neither (a browser is 300 MB and a minute); `apt-get install chromium` and
`pip install playwright` are enough, no browser of playwright's own is fetched.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from live_server import MINI, Live

from kakera.arch.registry import load_spec
from kakera.plan import weights
from kakera.plan.plan import Plan, Wishes
from kakera.plan.planner import make_plan
from kakera.target.devices import Device, Machine
from kakera.target.target import CPU

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH (apt-get install chromium)")
EXPECTED = re.compile(r"responded with a status of (401|429|503)|net::ERR_")  # of tests about such answers and none
MARKUP = "<img src=x onerror=alert(1)> <b>bold</b>"
HOSTILE = (
    "<script>alert(1)</script> <svg onload=alert(1)> [a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) "
    "[c](data:text/html,<script>alert(1)</script>) [d](//evil.example) [e](/v1/models) [f](https://good.example/x) "
    "![g](https://good.example/pixel.png) <javascript:alert(1)> <https://good.example/y> [h](vbscript:x) "
    "[<img src=x onerror=alert(1)>](https://good.example/z) [i](\\tjavascript:alert(1)) https://good.example/w\n\n"
    "| <b>x</b> | y |\n|---|---|\n| <iframe src=/> | [j](file:///etc/passwd) |\n\n"
    "```<script>\n</code></pre><script>alert(1)</script>\n```\n\n# <style>*{display:none}</style>\n\n- <object>\n"
)
ALLOWED = {
    "P",
    "H3",
    "DIV",
    "SPAN",
    "PRE",
    "CODE",
    "A",
    "BR",
    "UL",
    "LI",
    "BUTTON",
    "TABLE",
    "THEAD",
    "TBODY",
    "TR",
    "TH",
    "TD",
}
MARKED = "**bold** and `code`\n\n```python\nx = [1]\ny = 2\n```\n\n1. one\n2. two"
SCRIPT = [
    {"match": "hostile", "text": HOSTILE},
    {"match": "marked", "text": MARKED},
    {"match": "markup", "text": MARKUP},  # before "ponder", which a second turn's prompt still contains
    {"match": "ponder", "text": "I should greet.\n</think>\n\nHello!", "delay_ms": 5},
    {"match": "endless", "text": "word " * 3000, "delay_ms": 20},
    {"text": "Hello there.", "delay_ms": 5},
]


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # root has no user namespace
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser) -> Iterator[playwright.Page]:
    """Fails the test for anything that the browser complains about (missing files, policy, exceptions)."""
    complaints: list[str] = []
    context = browser.new_context()
    context.set_default_timeout(15_000)
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert [text for text in complaints if not EXPECTED.search(text)] == []


@pytest.fixture(scope="module")
def plan() -> Plan:
    spec = load_spec(MINI)
    machine = Machine(CPU, (Device("cpu", 32 * 10**9),), 32 * 10**9)
    return make_plan(spec, Wishes(context=8192), machine, weights.from_checkpoint(MINI, spec))


def ask(page: playwright.Page, text: str) -> playwright.Locator:
    """Send it by the Enter key; the answer's figures, which end with the speed."""
    page.fill("#chat-input", text)
    page.press("#chat-input", "Enter")
    return page.locator(".turn.assistant .figures").last


def test_the_page_shows_every_row_of_the_plan(page, serve, plan):
    live = serve(SCRIPT, plan=plan)
    page.goto(live.url)
    names = page.locator("#memory .row-name")
    names.first.wait_for()
    assert names.all_inner_texts() == [row.name for row in plan.rows]
    assert page.locator("#memory .part").count() == len(plan.rows)
    assert page.locator("#model").inner_text() == "mini"
    assert page.locator("#power-panel").is_hidden()


def test_a_chat_streams_folds_its_thinking_away_and_says_what_was_cached(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    page.select_option("#chat-effort", "low")
    playwright.expect(ask(page, "ponder this")).to_contain_text(re.compile(r"prompt tokens, 7 cached .*tokens/s"))
    answer = page.locator(".turn.assistant").last
    assert answer.locator(":scope > .text").inner_text().strip() == "Hello!"
    assert answer.locator("details .text").is_hidden()
    answer.locator("summary").click()
    assert "I should greet." in answer.locator("details .text").inner_text()
    page.select_option("#chat-effort", "none")
    playwright.expect(ask(page, "and now markup")).to_contain_text("cached")
    assert page.locator(".turn.assistant > .text").last.inner_text() == MARKUP
    assert page.locator("#chat-log img").count() == 0
    assert len(live.engine.requests[1].tokens) > len(live.engine.requests[0].tokens), "the turns before come along"
    playwright.expect(page.locator("#finished tbody tr")).to_have_count(2)
    playwright.expect(page.locator("#finished tbody tr").first).to_contain_text("cold")


def test_the_stop_button_ends_a_request(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    figures = ask(page, "endless")
    playwright.expect(page.locator(".turn.assistant > .text")).to_contain_text("word word")
    page.click("#chat-stop")
    playwright.expect(figures).to_have_text("stopped")
    live.wait_until(lambda: live.engine.aborted)
    playwright.expect(page.locator("#finished")).to_contain_text("abort")
    assert page.locator("#chat-stop").is_hidden()


def test_a_running_request_shows_its_progress(page, serve):
    live = serve(SCRIPT)
    live.engine.prefill_seconds = 60.0
    page.goto(live.url)
    ask(page, "endless")
    bar = page.locator("#active progress")
    bar.wait_for()
    assert 0 < int(bar.get_attribute("value")) < int(bar.get_attribute("max"))
    assert "reading the prompt" in page.locator("#active").inner_text()
    playwright.expect(page.locator("#t-running")).to_have_text("1")
    page.click("#chat-stop")
    playwright.expect(page.locator("#active")).to_contain_text("Nothing runs")


def test_a_key_is_asked_for_and_kept_in_the_tab_only(page, serve):
    live: Live = serve(SCRIPT, keys=("secret",))
    page.goto(live.url)
    key = page.locator("#key")
    key.wait_for()
    assert page.locator("#board").is_hidden()
    key.fill("wrong")
    key.press("Enter")
    playwright.expect(page.locator("#key-error")).to_contain_text("does not take this key")
    key.fill("secret")
    key.press("Enter")
    playwright.expect(ask(page, "hi")).to_contain_text("tokens/s")
    assert page.evaluate("document.cookie") == "" and "secret" not in page.evaluate("JSON.stringify({...localStorage})")
    page.reload()
    page.locator("#t-running").wait_for()  # the tab still has it


def test_a_server_that_goes_away_is_noticed(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    playwright.expect(page.locator("#link")).to_have_text("connected")
    page.route("**/v1/kakera/status", lambda route: route.fulfill(status=503, body="{}"))
    playwright.expect(page.locator("#link")).to_have_text("no connection")


@pytest.mark.parametrize("width", [320, 390, 800, 1600])
def test_nothing_sticks_out_at_any_width(page, serve, plan, width):
    live = serve(SCRIPT, plan=plan)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(live.url)
    page.locator("#memory tbody tr").first.wait_for()
    playwright.expect(ask(page, "hi")).to_contain_text("tokens/s")
    page.click("#settings summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def texts(page: playwright.Page, what: str) -> list[str]:
    return page.locator(f".turn.{what} > .text").all_inner_texts()


def test_markdown_is_shown_and_code_can_be_copied(page, serve):
    live = serve(SCRIPT)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(live.url)
    playwright.expect(ask(page, "marked")).to_contain_text("tokens/s")
    answer = page.locator(".turn.assistant > .text")
    assert answer.locator("strong").inner_text() == "bold" and answer.locator("ol li").count() == 2
    answer.locator(".code button").click()
    playwright.expect(answer.locator(".code button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = [1]\ny = 2"
    page.locator(".turn.assistant .actions button", has_text="Copy").click()
    page.wait_for_function("text => navigator.clipboard.readText().then((found) => found === text)", arg=MARKED)


def test_no_markup_of_a_model_becomes_active(page, serve):
    live = serve(SCRIPT)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: pytest.fail("a script ran"))
    page.goto(live.url)
    playwright.expect(ask(page, "hostile")).to_contain_text("tokens/s")
    answer = page.locator(".turn.assistant > .text")
    found = answer.evaluate(
        "node => [...node.querySelectorAll('*')].map((each) => [each.tagName, each.getAttributeNames()])"
    )
    assert {tag for tag, _ in found} <= ALLOWED
    assert {name for _, names in found for name in names} <= {
        "class",
        "href",
        "rel",
        "target",
        "title",
        "type",
        "tabindex",
    }
    links = answer.evaluate("node => [...node.querySelectorAll('a')].map((each) => [each.href, each.rel, each.target])")
    assert [href.removeprefix("https://good.example/") for href, _, _ in links] == ["x", "pixel.png", "y", "z", "w"]
    assert all((rel, target) == ("noopener noreferrer", "_blank") for _, rel, target in links)
    assert all(url.startswith(live.url) for url in asked), "nothing is loaded from elsewhere"
    page.reload()
    playwright.expect(page.locator("#history-count")).to_have_text("1")
    assert page.locator("#history-list img").count() == 0


def test_a_refusal_looks_like_an_error_and_keeps_the_prompt(page, serve):
    live = serve(SCRIPT, max_waiting=0)
    page.goto(live.url)
    page.fill("#chat-input", "my long prompt")
    page.press("#chat-input", "Enter")
    error = page.locator(".turn.error")
    playwright.expect(error).to_contain_text("The queue is full (status 429)")
    assert error.evaluate("node => getComputedStyle(node).color") != page.evaluate(
        "getComputedStyle(document.body).color"
    )
    assert page.input_value("#chat-input") == "my long prompt" and texts(page, "user") == ["my long prompt"]
    page.reload()
    playwright.expect(page.locator("#chat-input")).to_have_value("my long prompt")
    page.press("#chat-input", "Enter")
    playwright.expect(error).to_contain_text("429")
    live.engine.limits = replace(live.engine.limits, max_waiting=8)
    page.fill("#chat-input", "another thing meanwhile")
    error.locator("button").click()
    playwright.expect(page.locator(".turn.assistant .figures")).to_contain_text("tokens/s")
    assert texts(page, "user") == ["my long prompt"] and page.locator(".turn.error").count() == 0
    assert page.input_value("#chat-input") == "another thing meanwhile", "what is being written stays"


def test_a_prompt_that_is_sent_again_after_an_error_stands_there_once(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#chat-input", "hello over there")
    page.press("#chat-input", "Enter")
    playwright.expect(page.locator(".turn.error")).to_contain_text("The server can not be reached")
    page.unroute("**/v1/chat/completions")
    playwright.expect(ask(page, "hello over here")).to_contain_text("tokens/s")
    assert texts(page, "user") == ["hello over here"] and page.input_value("#chat-input") == ""


def test_an_answer_that_breaks_off_stays_and_says_why(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    ask(page, "endless")
    playwright.expect(page.locator(".turn.assistant > .text")).to_contain_text("word word")
    live.engine.dead = True
    playwright.expect(page.locator(".turn.error")).to_contain_text("killed by the test")
    assert "word word" in texts(page, "assistant")[0] and texts(page, "user") == ["endless"]
    live.engine.dead = False


def test_thinking_and_reading_show_life(page, serve):
    live = serve([{"match": "ponder", "text": "word " * 40 + "\n</think>\n\nHello!", "delay_ms": 60}, *SCRIPT])
    live.engine.prefill_seconds = 1.2
    page.goto(live.url)
    page.select_option("#chat-effort", "medium")
    figures = ask(page, "ponder this")
    playwright.expect(figures).to_contain_text(re.compile(r"reading the prompt: 0 of \d+ tokens · 1 s"))
    assert page.locator(".turn.assistant progress").is_visible()
    summary = page.locator(".turn.assistant summary")
    playwright.expect(summary).to_contain_text(re.compile(r"thinking · [12] s · about \d+ tokens"))
    assert page.locator(".turn.assistant progress").is_hidden()
    playwright.expect(summary).to_contain_text(re.compile(r"thought for [1-9] s · \d\d tokens"))
    playwright.expect(figures).to_contain_text("cached")
    page.reload()
    page.click("#history summary")
    page.click("#history-list .name")
    playwright.expect(summary).to_contain_text("thought for")


def test_requests_of_others_show_soon_and_ones_own_can_be_cancelled_from_the_list(page, serve):
    live = serve(SCRIPT)
    live.engine.prefill_seconds = 60.0
    page.goto(live.url)
    playwright.expect(page.locator("#t-running")).to_have_text("0")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(live.http.post, "/v1/completions", json={"prompt": "endless", "max_tokens": 2})
        live.wait_until(lambda: live.engine.open)
        playwright.expect(page.locator("#t-running")).to_have_text("1", timeout=600)
        assert page.locator("#active button").count() == 0, "nobody ends what another has sent"
        ask(page, "endless")
        page.locator("#active button").click()
        live.wait_until(lambda: live.engine.aborted)
        playwright.expect(page.locator(".turn.error")).to_contain_text("Stopped")
        assert page.input_value("#chat-input") == "endless"
        live.engine.prefill_seconds = 0.0
        live.engine.dead = True
        assert other.result().status_code == 503
        live.engine.dead = False


def test_settings_are_sent_and_kept(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    page.click("#settings summary")
    page.fill("#set-system", "Speak like a pirate.")
    page.fill("#set-temperature", "0.3")
    page.fill("#set-length", "3")
    page.select_option("#chat-effort", "low")
    page.reload()
    playwright.expect(ask(page, "ponder this")).to_contain_text("cut at the length limit")
    request = live.engine.requests[-1]
    assert "Speak like a pirate." in live.model.tokenizer.decode(request.tokens)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.3, 3)
    assert request.sampling.thinking.tokens == 1024
    page.click("#settings summary")
    page.fill("#set-system", "")
    page.fill("#set-temperature", "")
    page.fill("#set-length", "")
    page.select_option("#chat-effort", "none")
    playwright.expect(ask(page, "and more")).to_contain_text("tokens/s")
    assert "pirate" not in live.model.tokenizer.decode(live.engine.requests[-1].tokens)


def test_regenerate_and_edit(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    playwright.expect(ask(page, "first thing")).to_contain_text("tokens/s")
    playwright.expect(ask(page, "second thing")).to_contain_text("tokens/s")
    assert page.locator("button", has_text="Regenerate").count() == 1
    page.locator("button", has_text="Regenerate").click()
    live.wait_until(lambda: len(live.engine.requests) == 3)
    playwright.expect(page.locator("button", has_text="Regenerate")).to_be_visible()
    assert live.engine.requests[2].tokens == live.engine.requests[1].tokens
    page.fill("#chat-input", "a draft")
    page.locator(".turn.user button").first.click()
    assert page.input_value("#chat-input") == "first thing"
    page.click("#edit-cancel")
    assert page.input_value("#chat-input") == "a draft" and len(texts(page, "user")) == 2
    page.locator(".turn.user button").first.click()
    playwright.expect(ask(page, "another thing")).to_contain_text("tokens/s")
    assert texts(page, "user") == ["another thing"] and len(texts(page, "assistant")) == 1
    assert "first thing" not in live.model.tokenizer.decode(live.engine.requests[-1].tokens)


def test_chats_are_kept_renamed_and_deleted(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    playwright.expect(ask(page, "<b>the first</b> chat")).to_contain_text("tokens/s")
    page.click("#chat-new")
    assert texts(page, "user") == []
    playwright.expect(ask(page, "the second chat")).to_contain_text("tokens/s")
    page.reload()
    page.click("#history summary")
    names = page.locator("#history-list .name")
    playwright.expect(names).to_have_text(["the second chat", "<b>the first</b> chat"])
    names.last.click()
    playwright.expect(page.locator(".turn.user > .text")).to_have_text("<b>the first</b> chat")
    page.click("#history summary")
    page.locator("#history-list button", has_text="Rename").last.click()
    page.fill("#history-list input", "plums")
    page.press("#history-list input", "Enter")
    playwright.expect(names).to_have_text(["the second chat", "plums"])
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#history-list button", has_text="Delete").last.click()
    playwright.expect(names).to_have_text(["the second chat"])
    assert texts(page, "user") == [], "what was deleted is no longer shown"
    page.reload()
    playwright.expect(page.locator("#history-count")).to_have_text("1")


def test_kept_chats_have_a_bound(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    store = """async ([count, length]) => {
        const store = await import("/page/store.js");
        const kept = [];
        for (let i = 0; i < count; i += 1) {
            const messages = [{ role: "user", content: "x".repeat(length) }];
            kept.push(store.save({ id: `${i}`, title: `${i}`, messages }));
        }
        const size = Object.values({ ...localStorage }).reduce((sum, text) => sum + text.length, 0);
        const left = store.chats().map((chat) => Number(chat.id));
        localStorage.clear();
        return [kept.every(Boolean), left.length, Math.max(-1, ...left), size];
    }"""
    assert page.evaluate(store, [130, 10])[:3] == [True, 100, 129]
    kept, left, newest, size = page.evaluate(store, [12, 400_000])
    assert kept and (left, newest) == (4, 11) and size <= 2_000_000
    assert page.evaluate(store, [1, 3_000_000])[:2] == [False, 0], "said, not lost in silence"


def test_on_a_phone_the_chat_comes_first_and_dark_follows_the_system(browser, serve, plan):
    live = serve(SCRIPT, plan=plan)
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True, is_mobile=True
    )
    page = context.new_page()
    page.goto(live.url)
    page.locator("#memory tbody tr").first.wait_for()
    places = {name: page.locator(name).bounding_box() for name in ("#chat-input", "#chat-send", ".tiles", ".column")}
    assert all(places[name]["y"] + places[name]["height"] <= 844 for name in ("#chat-input", "#chat-send"))
    assert places[".tiles"]["y"] > places["#chat-send"]["y"] and places[".column"]["y"] > places[".tiles"]["y"]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 26)"
    page.fill("#chat-input", "one")
    page.press("#chat-input", "Enter")
    assert page.input_value("#chat-input") == "one\n", "the only way to a new line on a phone"
    context.close()


def test_pictures_are_chosen_pasted_shown_and_sent(page, seeing_model, tmp_path):
    """Made small, kept with the chat, and given back by an edit; a page of a text model offers none."""
    from live_server import start
    from PIL import Image

    from kakera.server.model import ServedModel

    vision = load_spec(seeing_model).vision
    model = ServedModel.load(seeing_model, "sees").seeing(vision, seeing_model, 256)
    Image.new("RGBA", (2000, 1000), (255, 0, 0, 0)).save(tmp_path / "wide.png")
    Image.new("RGB", (40, 60), "blue").save(tmp_path / "small.png")
    (tmp_path / "text.png").write_text("no picture")
    with start(model, tmp_path / "script.json", [{"text": "I see."}]) as server:
        page.goto(server.url)
        page.wait_for_selector("#chat-attach:visible")
        page.set_input_files("#chat-file", [tmp_path / "wide.png", tmp_path / "text.png", tmp_path / "small.png"])
        page.locator("#chat-pictures img").nth(1).wait_for()
        page.locator("#chat-pictures button").nth(1).click()
        page.evaluate(
            """async () => {
                const data = new DataTransfer();
                const canvas = document.createElement("canvas");
                canvas.width = canvas.height = 32;
                const blob = await new Promise((done) => canvas.toBlob(done));
                data.items.add(new File([blob], "pasted.png", { type: "image/png" }));
                document.getElementById("chat-input").dispatchEvent(
                    new ClipboardEvent("paste", { clipboardData: data, cancelable: true, bubbles: true }));
            }"""
        )
        page.locator("#chat-pictures img").nth(1).wait_for()
        ask(page, "what is this?")
        page.locator(".turn.assistant .actions button", has_text="Regenerate").wait_for()
        (request,) = server.engine.requests
        assert [(image.rows, image.columns) for image in request.images][1] == (4, 4)
        rows, columns = request.images[0].rows, request.images[0].columns
        assert columns == 2 * rows and set(request.images[0].pixels) == {255}  # what is transparent is white
        assert page.locator(".turn.user img").count() == 2 and not page.is_visible("#chat-pictures")
        page.locator(".turn.user button", has_text="Edit").click()
        assert page.locator("#chat-pictures img").count() == 2
        page.click("#edit-cancel")
        ask(page, "and now?")
        page.locator(".turn.assistant").nth(1).locator(".actions button", has_text="Regenerate").wait_for()
        assert len(server.engine.requests[-1].images) == 2  # of the history


def test_a_page_of_a_text_model_offers_no_pictures(page, serve):
    server = serve(SCRIPT)
    page.goto(server.url)
    page.wait_for_selector("#chat-send:visible")
    assert not page.is_visible("#chat-attach")
