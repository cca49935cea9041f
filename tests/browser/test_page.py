"""The page in a real browser over a real gateway: type, stream, stop, compare, error, reconnect, narrow, dark, keys.

Run by `make browser-test`; Debian's `chromium` has to be installed. Screenshots go to the folder PAGE_SHOTS, if set.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from specsplit.gateway.keys import new_key
from tests.support.gateways import GatewayProcess

SLOW_MS = 20_000
PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path is not None, "install chromium, for instance by: apt-get install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    started = GatewayProcess(tmp_path_factory.mktemp("gateway"), "--threads", "1")
    yield started
    started.close()


@pytest.fixture
def page(browser: Browser, gateway: GatewayProcess) -> Generator[Page]:
    yield from opened(browser, gateway.url)


def opened(browser: Browser, url: str, **options: object) -> Generator[Page]:
    """Open the page, and see at the end that the browser had nothing to complain about."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})  # type: ignore[arg-type]
    made = context.new_page()
    complaints: list[str] = []
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("console", lambda message: complaints.append(message.text) if "Content Security" in message.text else None)
    made.goto(url)
    yield made
    context.close()
    assert not complaints, complaints


def shot(page: Page, name: str) -> None:
    if "PAGE_SHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["PAGE_SHOTS"]) / f"{name}.png")


def ready(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("Ready", timeout=SLOW_MS)


def choose(page: Page, **fields: str) -> None:
    """Set fields of the settings, which are open or opened for it."""
    if not page.locator("#settings").is_visible():
        page.click("#settings-toggle")
    for name, value in fields.items():
        field = page.locator(f"#settings [name={name}]")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def ask(page: Page, prompt: str = PROMPT) -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def ended(page: Page, state: str = "done") -> None:
    expect(page.locator(".answer").last).to_have_attribute("data-state", state, timeout=SLOW_MS)


def test_an_answer_streams_in_with_its_draft_tokens_marked(page: Page) -> None:
    ready(page)
    choose(page, endpoint="completion", temperature="0", max_tokens="96", mode="pingpong")
    ask(page)
    expect(page.locator(".answer .text span").first).to_be_visible(timeout=SLOW_MS)
    ended(page)
    assert page.locator(".answer .text .accepted").count() > 3
    decoration = page.locator(".answer .text .accepted").first.evaluate("e => getComputedStyle(e).textDecorationLine")
    assert "underline" in decoration, "not by colour alone"
    assert page.locator(".bars .bar").count() > 3
    figures = page.locator(".figures").inner_text()
    assert re.search(r"tokens/s\s*[\d.]+", figures, re.IGNORECASE)
    assert page.locator(".text del").first.is_hidden()
    page.check("#show-rejected")
    assert page.locator(".text del:visible").count() > 0
    shot(page, "streamed")


def test_the_same_prompt_without_speculation_stands_beside_it(page: Page) -> None:
    ready(page)
    choose(page, endpoint="completion", temperature="0.8", seed="7", max_tokens="48")
    page.check("#compare")
    ask(page)
    expect(page.locator(".verdict")).to_contain_text("The texts are equal.", timeout=SLOW_MS)
    texts = page.locator(".answer .text")
    assert texts.count() == 2
    assert texts.nth(0).evaluate(WITHOUT_REJECTED) == texts.nth(1).evaluate(WITHOUT_REJECTED)
    shot(page, "compared")


WITHOUT_REJECTED = "e => [...e.querySelectorAll('span')].map(s => s.textContent).join('')"


def test_stop_ends_an_answer_and_retry_asks_again(page: Page) -> None:
    ready(page)
    choose(page, endpoint="completion", temperature="1", max_tokens="3000")
    ask(page)
    expect(page.locator("#send")).to_have_text("Stop")
    expect(page.locator(".answer .text span").first).to_be_visible(timeout=SLOW_MS)
    page.keyboard.press("Escape")
    ended(page, "stopped")
    expect(page.locator("#send")).to_have_text("Send")
    choose(page, max_tokens="8")
    page.click("text=Retry")
    ended(page)
    assert page.locator(".turn").count() == 1


def test_a_chat_goes_on_and_outlives_a_reload(page: Page) -> None:
    ready(page)
    choose(page, endpoint="chat", temperature="0", max_tokens="12")
    ask(page, "<b>hello</b>")
    ended(page)
    ask(page, "and again")
    expect(page.locator(".turn")).to_have_count(2)
    ended(page)
    assert page.locator(".turn .prompt").first.inner_text() == "<b>hello</b>", "text is never markup"
    before = page.locator("#conversation .text").all_inner_texts()
    page.reload()
    ready(page)
    assert page.locator("#conversation .text").all_inner_texts() == before
    page.click("#new-chat")
    expect(page.locator("#welcome")).to_be_visible()


def test_an_error_is_said_in_the_servers_words(page: Page) -> None:
    ready(page)
    choose(page, endpoint="completion", max_tokens="8")
    ask(page, "x " * 5000)
    expect(page.locator(".problem")).to_contain_text("context", timeout=SLOW_MS)
    shot(page, "error")
    choose(page, temperature="0")
    page.fill("#prompt", "")
    ask(page)
    ended(page)


def test_a_server_that_goes_away_is_noticed_and_its_return_too(browser: Browser, tmp_path: Path) -> None:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    options = ("--threads", "1", "--http", address)
    first = GatewayProcess(tmp_path, *options)
    second: GatewayProcess | None = None
    try:
        for page in opened(browser, first.url):
            ready(page)
            choose(page, endpoint="completion", max_tokens="3000")
            ask(page)
            expect(page.locator(".answer .text span").first).to_be_visible(timeout=SLOW_MS)
            first.process.kill()
            expect(page.locator(".problem")).to_be_visible(timeout=SLOW_MS)
            expect(page.locator("#status")).to_contain_text("away", timeout=SLOW_MS)
            first.close()
            second = GatewayProcess(tmp_path, *options)
            assert second.url == first.url, "it is there, as long as that may take"
            ready(page)
            choose(page, max_tokens="8")
            page.click("text=Try again")
            ended(page)
    finally:
        first.close()
        if second is not None:
            second.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, gateway: GatewayProcess, scheme: str) -> None:
    for page in opened(browser, gateway.url, viewport={"width": 360, "height": 740}, color_scheme=scheme):
        ready(page)
        choose(page, endpoint="completion", temperature="0", max_tokens="64", mode="pingpong")
        page.click("#settings-close")
        ask(page)
        ended(page)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360, f"the page is {width} px wide"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness = sum(map(int, re.findall(r"\d+", background)[:3]))
        assert (lightness < 200) == (scheme == "dark"), background
        shot(page, f"phone-{scheme}")


def test_everything_can_be_reached_and_named_by_keyboard(page: Page) -> None:
    ready(page)
    choose(page, endpoint="completion", temperature="0", max_tokens="8")
    ask(page)
    ended(page)
    unnamed = page.evaluate(UNNAMED)
    assert unnamed == [], "every control has an accessible name"
    page.locator("#prompt").focus()
    seen: set[str] = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"send", "show-rejected", "compare", "Copy", "Retry", "new-chat", "theme", "settings-toggle"} <= seen


UNNAMED = """() => [...document.querySelectorAll('button, input, select, textarea')]
    .filter(e => e.checkVisibility() && !(e.textContent.trim() || e.ariaLabel || e.labels?.length))
    .map(e => e.outerHTML)"""


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    key, line = new_key("alice")
    (tmp_path / "keys").write_text(line + "\n", encoding="utf-8")
    gateway = GatewayProcess(tmp_path, "--threads", "1", "--api-key-file", str(tmp_path / "keys"))
    try:
        for page in opened(browser, gateway.url):
            expect(page.locator("#status")).to_contain_text("API key", timeout=SLOW_MS)
            page.fill("#settings [name=key]", key)
            page.press("#settings [name=key]", "Tab")
            ready(page)
            choose(page, endpoint="completion", max_tokens="8")
            ask(page)
            ended(page)
            assert page.evaluate("Object.keys(localStorage)") == []
    finally:
        gateway.close()
