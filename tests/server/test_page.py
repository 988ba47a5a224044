"""The page in a real browser, headless: what a person would see. Skipped where there is no Chromium or no playwright.

Continuous integration installs neither (a browser is 300 MB and a minute); `apt-get install chromium` and
`pip install playwright` are enough, no browser of playwright's own is fetched.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

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
EXPECTED = re.compile(r"responded with a status of (401|503)")  # of the tests about a key and a lost server
MARKUP = "<img src=x onerror=alert(1)> <b>bold</b>"
SCRIPT = [
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
    page.check("#chat-think")
    playwright.expect(ask(page, "ponder this")).to_contain_text(re.compile(r"prompt tokens, 7 cached .*tokens/s"))
    answer = page.locator(".turn.assistant").last
    assert answer.locator(":scope > .text").inner_text().strip() == "Hello!"
    assert answer.locator("details .text").is_hidden()
    answer.locator("summary").click()
    assert "I should greet." in answer.locator("details .text").inner_text()
    page.uncheck("#chat-think")
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
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    page.locator("#t-running").wait_for()  # the tab still has it


def test_a_server_that_goes_away_is_noticed(page, serve):
    live = serve(SCRIPT)
    page.goto(live.url)
    playwright.expect(page.locator("#link")).to_have_text("connected")
    page.route("**/v1/kakera/status", lambda route: route.fulfill(status=503, body="{}"))
    playwright.expect(page.locator("#link")).to_have_text("no connection")


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_sticks_out_at_any_width(page, serve, plan, width):
    live = serve(SCRIPT, plan=plan)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(live.url)
    page.locator("#memory tbody tr").first.wait_for()
    playwright.expect(ask(page, "hi")).to_contain_text("tokens/s")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
