"""The chat page in a real browser, before a fake engine."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.server.engine_client import Overloaded
from tests.conftest import write_tokenizer
from tests.inference.server.page.served import Site

expect = pytest.importorskip("playwright.sync_api").expect
WAYS = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
BROWSER = next(filter(None, WAYS), None)
if BROWSER is None:
    pytest.skip("there is no Chromium on the path", allow_module_level=True)

expect.set_options(timeout=10_000)
NO_FAULT = "Failed to load resource"  # what Chromium logs for answers such as 401, which are meant
ANSWER = """# Scales

A **bold** word, an *odd* one, `code`, ~~old~~ and [a paper](https://example.org/a_(b)).

1. one
   - inner
2. two

```python
def add(a, b):
    return a + b
```

| a | b |
|---|--:|
| 1 | 2 |

> said

---
The end
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def site(tokenizer) -> Iterator[Site]:
    with Site(tokenizer) as site:
        yield site


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, site) -> Iterator[Callable[..., Any]]:
    """Opens the page as a visitor of its own; at the end none has logged an error."""
    contexts, faults = [], []

    def open_page(where: Site = site, width: int = 1000, height: int = 700, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda told: told.type == "error" and faults.append(told.text))
        page.goto(where.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [fault for fault in faults if NO_FAULT not in fault] == []


def ask(page: Any, text: str) -> Any:
    """Send a message once the last answer has ended; gives the last article, its answer."""
    page.get_by_label("Message", exact=True).fill(text)
    expect(page.locator("#send")).to_have_accessible_name("Send")  # an answer's text ends earlier
    page.keyboard.press("Enter")
    return page.locator("article").last


def told(page: Any) -> Any:
    """What the last answer took, which is there when it is complete."""
    return page.locator("article").last.locator(".told")


def eventually(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_answer_streams_is_rendered_and_measured(site, visit):
    site.says(ANSWER, delay=0.01)
    page = visit()
    expect(page.locator("#state")).to_have_text("Ready")
    expect(page.locator("h1")).to_have_text("tiny")
    expect(page.locator("#context")).to_have_text("8,192 tokens of context")
    answer = ask(page, "What are *scales*?")
    expect(answer.locator("h3")).to_have_text("Scales")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()  # it streams
    expect(told(page)).to_have_text(
        re.compile(r"^\d+ tokens · [\d.]+ tokens/s · first token after [\d.]+ s$")
    )
    assert page.locator(".said").inner_text() == "What are *scales*?"  # as it was written
    assert site.prompts == ["user: What are *scales*?\nassistant:"]
    found = {
        "strong": "bold",
        "em": "odd",
        "p code": "code",
        "del": "old",
        "a": "a paper (example.org)",
        "ol > li > ul > li": "inner",
        "ol > li:last-child": "two",
        ".block span": "python",
        "pre": "def add(a, b):\n    return a + b",
        "td:last-child": "2",
        "blockquote": "said",
        "hr + p": "The end",
    }
    for selector, text in found.items():
        assert answer.locator(selector).inner_text() == text, selector
    link = answer.locator("a")
    assert link.get_attribute("href") == "https://example.org/a_(b)"
    assert link.get_attribute("rel") == "noopener noreferrer"


def test_what_was_said_before_is_part_of_the_next_question_but_thoughts_are_not(site, visit):
    site.says("<think>\nHm.\n</think>\n\nFour", "Eight")
    page = visit()
    answer = ask(page, "2 + 2?")
    expect(told(page)).not_to_be_empty()
    assert answer.locator(".text:visible").inner_text() == "Four"
    answer.locator("summary").click()
    assert answer.locator("details .text").inner_text() == "Hm."
    ask(page, "And twice that?")
    expect(page.get_by_text("Eight")).to_be_visible()
    assert site.prompts[1] == "user: 2 + 2?\nassistant: Four\nuser: And twice that?\nassistant:"


@pytest.mark.parametrize("way", ["button", "Escape", "leaving"])
def test_stopping_ends_the_request_in_the_engine(site, visit, way):
    site.says("word " * 2000, delay=0.01)
    page = visit()
    answer = ask(page, "Talk")
    expect(answer).to_contain_text("word word")
    assert site.engine.running
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    elif way == "Escape":
        page.keyboard.press("Escape")
    else:
        page.close()
    if way != "leaving":
        expect(told(page)).to_have_text("stopped")
        expect(answer).to_contain_text("word word")  # what there is stays
    eventually(lambda: site.engine.aborted)
    assert not site.engine.running


def test_answers_are_made_again_and_messages_edited(site, visit):
    site.says("first", "second", "third", "fourth")
    page = visit()
    ask(page, "one")
    expect(page.locator("article .text").last).to_have_text("first")
    page.get_by_role("button", name="Another answer").click()
    expect(page.locator("article .text").last).to_have_text("second")
    assert site.prompts[0] == site.prompts[1]
    ask(page, "two")
    expect(page.locator("article .text").last).to_have_text("third")
    page.get_by_role("button", name="Edit and send again").first.click()
    page.get_by_label("Message", exact=True).first.fill("three")
    page.keyboard.press("Enter")
    expect(page.locator("article .text").last).to_have_text("fourth")
    assert site.prompts[3] == "user: three\nassistant:"
    assert page.locator("article").count() == 2


def test_everything_is_reached_by_the_keyboard(site, visit):
    site.says("spoken")
    page = visit()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    expect(told(page)).not_to_be_empty()
    assert site.prompts == ["user: line one\nline two\nassistant:"]
    page.evaluate("document.body.tabIndex = -1, document.body.focus()")
    reached = []
    while len(reached) < 30:
        page.keyboard.press("Tab")
        name, shown = page.evaluate(FOCUS)
        if not name:
            break
        reached.append(name)
        assert shown, f"{name} does not show that it has the focus"
    assert reached == ["To the text field", "New conversation", "line one", "Delete: line one",
                       "Settings", "Copy", "Edit and send again", "Copy", "Another answer", "Message"]  # fmt: skip
    page.get_by_role("button", name="Settings").press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).not_to_be_visible()


def test_settings_reach_the_request_within_their_bounds(site, visit):
    site.says("yes")
    page = visit()
    page.get_by_role("button", name="Settings").click()
    values = {"System message": "Be short.", "Temperature": "0.7", "Top p": "0.9", "Top k": "40",
              "Max tokens": "64", "Seed": "7", "Min p": "0.05", "Stop texts": "END\n\\n\\n"}  # fmt: skip
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Done").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Is it?")
    expect(told(page)).not_to_be_empty()
    body = sent.value.post_data_json
    assert body["stop"] == ["END", "\n\n"]
    assert body["stream_options"] == {"include_usage": True}
    (params,) = site.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.7, 0.9, 40, 7)
    assert (params.min_p, params.max_tokens) == (0.05, 64)
    assert site.prompts == ["system: Be short.\nuser: Is it?\nassistant:"]
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("3")
    page.keyboard.press("Escape")
    ask(page, "And now?")
    expect(page.get_by_role("dialog")).to_be_visible()  # where the value is wrong
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert len(site.params) == 1


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(tokenizer, visit):
    with Site(tokenizer, api_key="secret") as locked:
        locked.says("in")
        page = visit(locked)
        expect(page.locator("#banner")).to_contain_text("asks for an API key")
        answer = ask(page, "Hello")
        expect(answer.get_by_role("alert")).to_contain_text("--api-key")
        answer.get_by_role("button", name="Enter the key").click()
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("Ready")
        expect(page.locator("#banner")).not_to_be_visible()
        answer.get_by_role("button", name="Try again").click()
        expect(page.locator("article").last).to_contain_text("in")
        stored = page.evaluate("[JSON.stringify({...localStorage}), sessionStorage['ptq.key']]")
        assert "secret" not in stored[0]
        assert stored[1] == "secret"


def test_a_busy_server_is_asked_again(site, visit, monkeypatch):
    site.says("at last")
    page = visit()
    submit, tries = site.engine.client.submit, []

    def full_at_first(*asked: Any) -> Any:
        tries.append(asked)
        if len(tries) == 1:
            raise Overloaded("1,024 requests wait already", 1)
        return submit(*asked)

    monkeypatch.setattr(site.engine.client, "submit", full_at_first)
    answer = ask(page, "Is there room?")
    expect(page.locator("#state")).to_have_text("Busy, again in 1 s")
    expect(answer).to_contain_text("at last")
    expect(page.locator("#state")).to_have_text("Ready")
    assert len(tries) == 2


def test_errors_are_told_as_the_server_words_them(site, visit):
    site.says("x" * 4000, "better", delay=0.005)
    page = visit()
    answer = ask(page, "Fail")
    expect(answer).to_contain_text("xxxx")
    site.call(lambda: site.engine.fail("the step failed: out of memory"))
    expect(answer.get_by_role("alert")).to_contain_text("out of memory")
    expect(answer.locator(".text")).to_contain_text("xxxx")  # what came before stays
    answer.get_by_role("button", name="Try again").click()
    expect(page.locator("article").last.locator(".text")).to_have_text("better")
    site.engine.refuse = ("seed: this engine takes none", "seed")
    answer = ask(page, "Refuse")
    expect(answer.get_by_role("alert")).to_contain_text("seed: this engine takes none")
    answer.get_by_role("button", name="Open the setting").click()
    expect(page.get_by_label("Seed")).to_be_focused()


def test_a_message_that_is_too_long_is_left_out_of_what_follows(site, visit):
    site.says("yes")
    page = visit()
    ask(page, "First")
    answer = ask(page, "long " * 9000)
    expect(answer.get_by_role("alert")).to_contain_text("maximum context length is 8192 tokens")
    expect(answer.get_by_role("alert")).to_contain_text("It is left out of what follows")
    ask(page, "Second")
    expect(told(page)).not_to_be_empty()
    said = "user: First\nassistant: yes\nuser: Second\nassistant:"
    assert site.prompts == ["user: First\nassistant:", said]
    page.reload()
    ask(page, "Third")
    expect(told(page)).not_to_be_empty()
    assert site.prompts[-1] == f"{said} yes\nuser: Third\nassistant:"


def test_how_much_of_the_context_is_filled_is_shown(site, visit):
    site.says("yes")
    page, meter = visit(), "Part of the context that is filled"
    expect(page.get_by_label(meter)).not_to_be_visible()
    for question in ("First", "Second " * 400):
        ask(page, question)
        expect(told(page)).not_to_be_empty()
        asked, answered = page.evaluate("[current.messages.at(-1).told.used, 0]")
        assert asked > len(question) / 8
        expect(page.locator("#context")).to_have_text(f"{asked:,} of 8,192 tokens")
        assert float(page.get_by_label(meter).get_attribute("value")) == asked > answered
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#context")).to_have_text("8,192 tokens of context")
    expect(page.get_by_label(meter)).not_to_be_visible()


def test_conversations_are_exported_and_imported(site, visit, tmp_path):
    site.says("yes")
    page, other = visit(), visit()
    for question in ("One", "Two"):
        page.get_by_role("button", name="New conversation").click()
        ask(page, question)
        expect(told(page)).not_to_be_empty()
    page.get_by_role("button", name="Settings").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export").click()
    assert re.fullmatch(r"conversations-\d{4}-\d\d-\d\d\.json", saved.value.suggested_filename)
    exported = tmp_path / "exported.json"
    saved.value.save_as(exported)

    def bring(text: str | Path) -> None:
        file = text if isinstance(text, Path) else tmp_path / "other.json"
        if isinstance(text, str):
            file.write_text(text)
        other.get_by_role("button", name="Settings").click()
        with other.expect_file_chooser() as chooser:
            other.get_by_role("button", name="Import").click()
        chooser.value.set_files(file)
        expect(other.get_by_role("dialog")).not_to_be_visible()

    listed = other.locator("#list .open")
    bring(exported)
    expect(listed).to_have_text(["Two", "One"])
    expect(other.locator("article")).to_have_count(2)
    bring(exported)
    expect(other.locator("#toast")).to_contain_text("All of it is here already")
    expect(listed).to_have_count(2)
    bring('[{"role": "user", "content": "<b>Three"}, {"role": "assistant", "content": "3"}]')
    expect(listed).to_have_text(["<b>Three", "Two", "One"])
    for wrong in (
        "{",
        "5",
        '{"messages": [{"role": "system", "content": "a"}]}',
        '{"messages": [3]}',
    ):
        bring(wrong)
        expect(other.locator("#toast")).to_contain_text("other.json cannot be imported")
    expect(listed).to_have_count(3)
    ask(other, "And?")
    expect(told(other)).not_to_be_empty()
    assert site.prompts[-1] == "user: <b>Three\nassistant: 3\nuser: And?\nassistant:"


def test_settings_are_those_of_the_model(site, tokenizer, visit):
    with Site(tokenizer, chats=False) as texts:
        texts.says("yes")
        for where, chats in ((site, True), (texts, False)):
            page = visit(where)
            expect(page.locator("#state")).to_have_text("Ready")
            page.get_by_role("button", name="Settings").click()
            shown = page.get_by_role("dialog").inner_text()
            assert ("temperature 0.2" in shown, "System message" in shown) == (not chats, chats)


def test_code_has_the_colours_of_its_language(long_page):
    show = """([language, text]) => {
        const to = document.createElement("div");
        showText(to, "```" + language + "\\n" + text + "\\n```");
        const code = to.querySelector("code");
        return [code.textContent, [...code.children].map((each) => [each.className, each.textContent])];
    }"""
    cases = {
        ("python", "def f(x):  # it's\n    return f'a\\'b' + 1.5e3"): [
            *(["word", "def"], ["remark", "# it's"], ["word", "return"]),
            *(["string", r"f'a\'b'"], ["number", "1.5e3"]),
        ],
        ("Python", '''"""a\n# b"""\nNone'''): [["string", '"""a\n# b"""'], ["word", "None"]],
        ("js", "const a = `x\n${1}`; // no\n/* a\nb */ 0xff"): [
            *(["word", "const"], ["string", "`x\n${1}`"], ["remark", "// no"]),
            *(["remark", "/* a\nb */"], ["number", "0xff"]),
        ],
        ("json", '{"a": [true, -1.5]}'): [["string", '"a"'], ["word", "true"], ["number", "1.5"]],
        ("rust", "fn f<'a>(x: &'a T) -> 'b'"): [["word", "fn"], ["string", "'b'"]],
        ("bash", "echo a#b # c"): [["remark", "# c"]],
        ("sql", "SELECT 1 -- one"): [["word", "SELECT"], ["number", "1"], ["remark", "-- one"]],
        ("text", "def 1"): [],
        ("", "def 1"): [],
    }
    for (language, text), coloured in cases.items():
        assert long_page.evaluate(show, [language, text]) == [text, coloured]


def test_states_of_the_server_are_told(tokenizer, visit):
    with Site(tokenizer, warm=False) as cold:
        page = visit(cold)
        expect(page.locator("#state")).to_have_text("Loading")
        expect(page.locator("#banner")).to_contain_text("being loaded")
        cold.call(cold.engine.start)
        expect(page.locator("#state")).to_have_text("Ready")
        expect(page.locator("h1")).to_have_text("tiny")
        cold.call(cold.engine.die)
        page.evaluate("look()")
        expect(page.locator("#banner")).to_contain_text("engine has stopped")
    page.evaluate("look()")
    expect(page.locator("#state")).to_have_text("Not reachable")
    answer = ask(page, "Anyone?")
    expect(answer.get_by_role("alert")).to_contain_text("cannot be reached")


def test_conversations_are_kept_deleted_and_brought_back(site, visit):
    site.says("kept answer")
    page = visit()
    ask(page, "remember me")
    expect(told(page)).not_to_be_empty()
    page.reload()
    expect(page.get_by_text("kept answer")).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_text("kept answer")).not_to_be_visible()
    page.get_by_role("button", name="remember me", exact=True).click()
    expect(page.get_by_text("kept answer")).to_be_visible()
    page.get_by_role("button", name="Delete: remember me").click()
    assert page.locator("#list li").count() == 0
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_text("kept answer")).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("switch", name="Keep conversations").click()
    page.get_by_role("button", name="Done").click()
    ask(page, "forget me")
    expect(told(page)).not_to_be_empty()
    assert page.evaluate("Object.keys(localStorage)") == ["ptq.keep"]
    page.reload()
    expect(page.locator("#state")).to_have_text("Ready")
    assert page.locator("#list li").count() == 0


def test_a_model_without_a_template_continues_a_text_in_place(tokenizer, visit):
    with Site(tokenizer, chats=False) as plain:
        plain.says("return a + b", "return b + a")
        page = visit(plain)
        expect(page.locator("#why")).to_contain_text("no chat template")
        text = page.get_by_label("Text that the model continues")
        text.fill("def add(a, b):\n    ")
        page.keyboard.press("Control+Enter")
        expect(text).to_have_value("def add(a, b):\n    return a + b")
        expect(page.locator("#told")).to_contain_text("tokens")
        assert plain.prompts == ["def add(a, b):\n    "]
        page.get_by_role("button", name="Another continuation").click()
        expect(text).to_have_value("def add(a, b):\n    return b + a")
        page.get_by_role("button", name="Take the continuation back").click()
        expect(text).to_have_value("def add(a, b):\n    ")
        page.get_by_role("button", name="Bring the continuation back").click()
        expect(text).to_have_value("def add(a, b):\n    return b + a")
        page.reload()
        expect(text).to_have_value("def add(a, b):\n    return b + a")


def test_texts_and_code_are_copied(site, visit):
    site.says("Look:\n\n```\nx = 1\n```")
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    ask(page, "Show")
    expect(told(page)).not_to_be_empty()
    page.get_by_role("button", name="Copy the code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    page.locator("article").last.get_by_role("button", name="Copy", exact=True).click()
    assert page.evaluate("navigator.clipboard.readText()") == "Look:\n\n```\nx = 1\n```"


FOCUS = """() => {
    const at = document.activeElement, outlined = getComputedStyle(at).outlineStyle !== "none";
    if (at === document.body) return ["", true];
    return [at.getAttribute("aria-label") ?? at.textContent.trim(), outlined || at.closest(".box") !== null];
}"""
HOSTILE = [
    "<script>boom()</script>", "<img src=x onerror=boom()>",
    "<svg onload=boom()><style>*{display:none}</style>",
    "[a](javascript:boom()) [b](data:text/html,x) [c](https://x\" onclick=\"boom())",
    "![x](https://example.org/x.png)", "&lt;b&gt; &#60;i&#62;", "| <b>a</b> |\n|---|\n| <i>b</i> |",
    "> - # <iframe src=//example.org>", "<https://example.org/<script>>",
    "https://example.org@evil.example/ [https://bank.example](https://evil.example/)",
    "\u202e\x00<base href=//example.org>", "```html\n<script>boom()</script>",
]  # fmt: skip
SHOW = (
    "text => { const to = document.createElement('div'); showText(to, text); return to.innerHTML; }"
)
RENDERERS = set("a blockquote br button code del div em h3 h4 h5 h6 hr li ol p pre span strong svg "
                "table tbody td th thead tr ul use".split())  # fmt: skip


def test_nothing_that_a_model_writes_becomes_markup(site, visit):
    site.says("\n\n".join(HOSTILE))
    page = visit()
    answer = ask(page, "\n\n".join(HOSTILE))
    expect(told(page)).not_to_be_empty()
    names = "made => [...made.querySelectorAll('*')].map(each => each.localName)"
    assert set(answer.locator(".text").evaluate(names)) <= RENDERERS
    assert page.locator("article.user .said").evaluate(names) == []
    links = answer.locator("a").evaluate_all("all => all.map(a => [a.href, a.textContent])")
    assert all(address.startswith("https://") for address, _ in links)
    assert ["https://evil.example/", "https://bank.example (evil.example)"] in links
    attributes = answer.locator(".text").evaluate(
        "made => [...made.querySelectorAll('*')].flatMap(each => each.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "style")]


def test_a_text_that_streams_is_shown_as_the_whole_of_it(site, visit):
    page = visit()
    parts = """([text, step]) => {
        const to = document.createElement('div');
        for (let end = 1; end < text.length; end += step) showText(to, text.slice(0, end));
        showText(to, text);
        return to.innerHTML;
    }"""
    for text in (ANSWER, "\n\n".join(HOSTILE)):
        for step in (1, 7):
            assert page.evaluate(parts, [text, step]) == page.evaluate(SHOW, text)


UNITS = ["a", "`", "`a", "*", "*a", "**a *b ", "_a", "[", "[a](", "[a](https://a ", "![", "]",
         ">", "> ", "- ", "-", "1. ", "#", "# ", "|", "|-", "a|\n-|", "\n", "a\n", "- a\n  ",
         "```\n", "~~", "\\", "https://a", "(https://", " ", "\t", "<", "a\n\n", "| a | b\n"]  # fmt: skip


def test_long_hostile_texts_take_linear_time(long_page):
    """What took the square of its length would take some minutes for one of them."""
    slow = long_page.evaluate(
        """units => units.filter((unit) => {
            const begun = performance.now();
            showText(document.createElement("div"), unit.repeat(100000 / unit.length));
            return performance.now() - begun > 2000;
        })""",
        UNITS,
    )
    assert slow == []


def test_long_hostile_code_takes_linear_time(long_page):
    units = [
        *"'\"`\\#/*-1.ea_",
        "\\'",
        "'\\",
        '"""',
        "/*",
        "//",
        "1e",
        "0x",
        "if",
        "f'",
        "'\n",
        "$",
    ]
    slow = long_page.evaluate(
        """([units, languages]) => units.flatMap((unit) => languages.filter((language) => {
            const begun = performance.now();
            colours({language, text: unit.repeat(50000 / unit.length)});
            return performance.now() - begun > 1500;
        }))""",
        [units, ["python", "bash", "js", "sql"]],
    )
    assert slow == []


def test_a_line_of_a_megabyte_is_shown(long_page):
    show = "() => { const to = document.createElement('div'); showText(to, '<b>x'.repeat(250000)); return to.textContent.length; }"
    assert long_page.evaluate(show) == 1_000_000


@pytest.fixture(scope="module")
def long_page(browser, site) -> Iterator[Any]:
    page = browser.new_page()
    page.goto(site.url)
    yield page
    page.close()


def test_the_browser_itself_refuses_markup_scripts_and_other_hosts(long_page):
    write = (
        "() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.name; } }"
    )
    assert long_page.evaluate(write) == "TypeError"
    script = """() => {
        const made = document.createElement("script");
        made.append("window.broken = true");
        document.body.append(made);
        return window.broken ?? null;
    }"""
    assert long_page.evaluate(script) is None
    other = "fetch('https://example.org').catch(error => error.name)"
    assert long_page.evaluate(other) == "TypeError"


@pytest.mark.parametrize("width", [360, 400, 1400])
def test_the_page_fits_the_screen(site, visit, width):
    site.says(ANSWER + "\n\n```\n" + "wide " * 100 + "\n```\n\n" + "unbroken" * 60)
    page = visit(width=width, height=800, has_touch=width < 500)
    ask(page, "unbroken" * 40)
    expect(told(page)).not_to_be_empty()
    for opened in (None, "Settings"):
        if opened:
            page.get_by_role("button", name=opened).click()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.getElementById('scroll').scrollWidth") <= width
        small = page.evaluate(
            """() => [...document.querySelectorAll("button, summary, input, .switch")]
            .filter(each => each.checkVisibility() && each.getBoundingClientRect().right > 0)
            .map(each => [each.outerHTML.slice(0, 80), each.closest(".switch, label") ?? each])
            .filter(([_, each]) => Math.min(each.offsetWidth, each.offsetHeight) < 44)
            .map(([name]) => name)"""
        )
        assert width > 500 or small == []


def test_texts_have_contrast_in_the_light_and_in_the_dark(long_page):
    for scheme in ("light", "dark"):
        long_page.emulate_media(color_scheme=scheme)
        assert long_page.evaluate(CONTRAST) == [], scheme


CONTRAST = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const channels = (name) => {
        canvas.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    };
    const light = (name) => channels(name)
        .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const pairs = [["--on-accent", "--accent"], ["--bad", "--bad-ground"], ["--warn", "--warn-ground"],
        ["--ink", "--bad-ground"], ["--ink", "--warn-ground"], ["--ink", "--tint"]];
    for (const ground of ["--page", "--ground", "--raised", "--code"]) {
        for (const text of ["--ink", "--soft", "--accent", "--good"]) pairs.push([text, ground]);
    }
    for (const text of ["--word", "--string", "--number", "--remark"]) pairs.push([text, "--code"]);
    return pairs.filter(([one, other]) => {
        const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05) < 4.5;
    });
}"""


def test_the_page_comes_with_a_policy_that_lets_nothing_in(site):
    found = httpx.get(site.url)
    assert found.status_code == 200
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    policy = found.headers["content-security-policy"]
    for part in (
        "default-src 'none'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    ):
        assert part in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[\w+/=]{44}'", policy)) == 2
    assert found.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(site.url, headers={"If-None-Match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.head(site.url).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["index.html", "page/index.html", "../route.py", "..%2froute.py", "%2e%2e/%2e%2e/etc/passwd",
     "ui/../../etc/passwd", "/etc/passwd", "//etc/passwd", "static/../app.py", "..\\app.py"],
)  # fmt: skip
def test_no_other_file_is_served(site, path):
    """Sent as it stands: clients would clean it up first."""
    import socket

    host, port = site.url.removeprefix("http://").strip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 404")
