"""The page at / in headless Chromium, over an engine whose answers are scripted."""

import importlib.util
import shutil
import signal
from types import SimpleNamespace

import pytest

from tests.fake_server import FakeClient, running
from tests.server.http.test_serve import serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="there is no playwright: pip install it"),
]
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 20_000
MARKDOWN = """## Title
Some **bold** and `code` and *slanted*, __init__ and snake_case_name.
1. one
   - inner
2. two

> quoted

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):  # a comment
    return "<b>"
```
[fine](https://example.com/a_(b)) and https://example.org/x."""
ATTACKS = """<script>window.hit = 1</script><img src=x onerror="window.hit = 1"><svg onload="window.hit = 1">
[a](javascript:window.hit=1) [b](data:text/html,x) [c](JaVaScRiPt:window.hit=1) ![d](https://evil.example/x.png)
[e](https://ok.example/"onmouseover="window.hit=1) <https://ok.example/"><img src=x onerror=window.hit=1>
```"><img src=x onerror=window.hit=1>
<script>window.hit = 1</script>"""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS, timeout=60_000)
        yield browser
        browser.close()


class Visit:
    """A page in a browser profile of its own; what it complains about, and where it turns to."""

    def __init__(self, browser, web, **options):
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints, self.requested = [], []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(web.url)

    def ask(self, text: str) -> None:
        self.page.fill("#chat-input", text)
        self.page.press("#chat-input", "Enter")

    def answered(self, text: str = "Answer anew") -> str:
        self.page.get_by_role("button", name=text).wait_for()
        return self.page.locator(".assistant .markdown").last.inner_text()


@pytest.fixture
def visit(browser):
    visits = []

    def open_page(web, **options):
        visits.append(Visit(browser, web, **options))
        return visits[-1]

    yield open_page
    for one in visits:
        one.context.close()


def test_a_conversation(visit):
    client = FakeClient(says={"Again": "Second answer"})
    with running(client) as web:
        v = visit(web)
        v.page.get_by_text("What would you like to ask?").wait_for()
        assert v.page.locator("#model").inner_text() == "fake"
        assert v.page.locator("#chat-send").is_disabled()
        v.ask("Tell me")
        assert v.answered() == "Hello, world"
        assert "12 tokens" in v.page.locator(".assistant footer").inner_text()
        v.ask("Again")
        v.page.get_by_text("Second answer").wait_for()
        assert v.answered() == "Second answer"
        assert v.page.locator(".chat-title").all_inner_texts() == ["Tell me"]
        v.page.reload()
        v.page.get_by_text("Second answer").wait_for()
        assert v.page.locator(".bubble").all_inner_texts() == ["Tell me", "Again"], "the browser keeps it"
    prompt = client._decoder.decode(client.seen[1][0], skip_special_tokens=False)
    assert "Tell me" in prompt and "Hello, world" in prompt and "Again" in prompt
    assert not v.complaints and all(url.startswith(web.url) for url in v.requested if not url.startswith("data:"))


def test_markdown(visit):
    with running(FakeClient(MARKDOWN, step=5)) as web:
        v = visit(web)
        v.ask("x")
        v.answered()
        answer = v.page.locator(".markdown")
        for selector, text in [
            ("h4", "Title"),
            ("strong >> nth=0", "bold"),
            ("p code", "code"),
            ("em", "slanted"),
            ("ol > li >> nth=1", "two"),
            ("ol ul li", "inner"),
            ("blockquote p", "quoted"),
            ("td.right", "2"),
            ("pre .c-keyword >> nth=0", "def"),
            ("pre .c-comment", "# a comment"),
            ("pre .c-string", '"<b>"'),
            (".code-head span", "python"),
        ]:
            assert answer.locator(selector).inner_text() == text, selector
        assert "snake_case_name" in answer.inner_text()
        links = answer.locator("a").evaluate_all("nodes => nodes.map((a) => [a.href, a.rel, a.target])")
        rel = "noopener noreferrer nofollow"
        expected = ["https://example.com/a_(b)", "https://example.org/x"]
        assert links == [[url, rel, "_blank"] for url in expected]
        assert not v.complaints


def test_nothing_that_a_model_writes_becomes_markup(visit):
    with running(FakeClient(ATTACKS, step=9)) as web:
        v = visit(web)
        v.page.click("#open-settings")
        v.page.fill("[name=max_tokens]", "")
        v.page.keyboard.press("Escape")
        v.ask('<img src=x onerror="window.hit = 1">')
        v.answered()
        v.page.reload()
        v.answered()
        inside = v.page.locator("#log")
        assert inside.locator("script, img, iframe, [onerror], [onload], [onmouseover]").count() == 0
        protocols = inside.locator("a").evaluate_all("nodes => nodes.map((a) => a.protocol)")
        assert protocols and set(protocols) <= {"https:"}
        assert v.page.evaluate("window.hit") is None
        assert "onerror" in inside.inner_text(), "it is shown as text"
        assert not v.complaints and all(web.url in url for url in v.requested if not url.startswith("data:"))


def test_the_policy_refuses_markup_from_scripts_too(visit):
    with running() as web:
        v = visit(web)
        v.page.get_by_text("What would you like").wait_for()
        failed = v.page.evaluate("() => { try { document.body.innerHTML = '<b>'; } catch (e) { return e.name; } }")
        assert failed == "TypeError"


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_frees_the_engine_and_keeps_the_text(visit, way):
    client = FakeClient("A long answer. " * 9)
    with running(client) as web:
        client.gate.clear()
        v = visit(web)
        v.ask("Go")
        web.wait(lambda: client.running)
        v.page.get_by_text("Reading the prompt").wait_for()
        if way == "button":
            v.page.get_by_role("button", name="Stop").click()
        else:
            v.page.keyboard.press("Escape")
        web.wait(lambda: client.aborted)
        v.page.get_by_text("stopped").wait_for()
        client.gate.set()
        v.page.get_by_role("button", name="Answer anew").click()
        v.page.get_by_text("A long answer.").wait_for()
        assert v.page.locator(".assistant").count() == 1


def test_thoughts_are_folded(visit):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"
    with running(FakeClient("<think>Hm, hm.</think>So be it."), template=template) as web:
        v = visit(web)
        v.ask("Well?")
        assert v.answered() == "So be it."
        thoughts = v.page.locator("details.thoughts")
        assert thoughts.get_attribute("open") is None
        thoughts.locator("summary").click()
        assert thoughts.locator("div").inner_text() == "Hm, hm."


def test_settings_reach_the_engine(visit):
    client = FakeClient()
    with running(client) as web:
        v = visit(web)
        v.page.click("#open-settings")
        values = {"temperature": "0.3", "top_p": "0.9", "top_k": "7", "max_tokens": "5", "seed": "11"}
        for name, value in (values | {"system": "Be kind"}).items():
            v.page.fill(f"[name={name}]", value)
        v.page.get_by_role("button", name="Done").click()
        v.page.reload()
        v.ask("Hi")
        assert v.answered() == "Hello"
        assert "cut at the limit" in v.page.locator(".assistant footer").inner_text()
    ids, params, _ = client.seen[0]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.3, 0.9, 7, 5, 11)
    assert "Be kind" in client._decoder.decode(ids, skip_special_tokens=False)


SLOW_STATS = """const fetched = window.fetch;
window.fetch = async (resource, options) => {
  if (String(resource.url ?? resource).includes("stats")) await new Promise((resolve) => setTimeout(resolve, 1500));
  return fetched(resource, options);
};"""


def test_a_question_before_the_page_knows_its_server(visit):
    with running() as web:
        v = visit(web)
        v.page.add_init_script(SLOW_STATS)
        v.page.reload()
        v.ask("Hi")
        assert v.answered() == "Hello, world"


def test_conversations_are_renamed_deleted_and_brought_back(visit):
    with running() as web:
        v = visit(web)
        v.ask("First")
        v.answered()
        v.page.click("#new-chat")
        v.ask("Second")
        v.answered()
        titles = v.page.locator(".chat-title")
        assert titles.all_inner_texts() == ["Second", "First"]
        titles.nth(1).hover()
        v.page.get_by_role("button", name="Rename First").click()
        v.page.keyboard.type("Renamed")
        v.page.keyboard.press("Enter")
        assert titles.all_inner_texts() == ["Second", "Renamed"]
        titles.nth(0).hover()
        v.page.get_by_role("button", name="Delete Second").click()
        assert titles.all_inner_texts() == ["Renamed"]
        v.page.get_by_role("button", name="Undo").click()
        assert titles.all_inner_texts() == ["Second", "Renamed"]
        v.page.reload()
        assert titles.all_inner_texts() == ["Second", "Renamed"]


def test_two_tabs_have_the_same_conversations(visit):
    with running() as web:
        v = visit(web)
        v.ask("First")
        v.answered()
        other = v.context.new_page()
        other.goto(web.url)
        other.click("#new-chat")
        other.fill("#chat-input", "Second")
        other.press("#chat-input", "Enter")
        other.get_by_role("button", name="Answer anew").wait_for()
        v.page.locator(".chat-title", has_text="Second").wait_for()
        assert v.page.locator(".bubble").all_inner_texts() == ["First"], "it shows what it did"
        v.ask("Third")
        v.page.get_by_role("button", name="Answer anew").wait_for()
        other.reload()
        assert sorted(other.locator(".chat-title").all_inner_texts()) == ["First", "Second"]


def test_a_key_is_asked_for(visit):
    with running(api_keys=("the-key",)) as web:
        v = visit(web)
        v.page.get_by_text("This server wants an API key").wait_for()
        v.page.fill("#key-input", "wrong")
        v.page.keyboard.press("Enter")
        v.page.get_by_text("The key was not accepted").wait_for()
        v.page.fill("#key-input", "the-key")
        v.page.get_by_role("button", name="Use it").click()
        v.page.locator("#model", has_text="fake").wait_for()
        v.ask("Hi")
        assert v.answered() == "Hello, world"
        assert v.page.evaluate("JSON.stringify(localStorage)").find("the-key") < 0, "it is not kept for good"


def test_completions_and_the_place_in_the_queue(visit):
    client = FakeClient(" goes on")
    with running(client) as web:
        client.gate.clear()
        busy = web.open_stream()
        web.wait(lambda: client.running)
        web.server._num_waiting = lambda: 2
        v = visit(web)
        v.page.click("#tab-complete")
        v.page.get_by_role("button", name="A story").click()
        v.page.get_by_text("In the queue: 1 request before this one").wait_for()
        client.gate.set()
        v.page.locator("#complete-more").wait_for()
        assert v.page.locator("#output").inner_text() == "Once upon a time goes on"
        v.page.click("#complete-more")
        v.page.get_by_text("Once upon a time goes on goes on").wait_for()
        busy.close()


def test_a_model_without_a_template_completes(visit):
    with running(template=None) as web:
        v = visit(web)
        v.page.get_by_text("This model has no chat template").wait_for()
        assert v.page.locator("#complete").is_visible() and not v.page.locator("#chat").is_visible()
        v.page.click("#tab-chat")
        v.page.get_by_text("This model doesn't chat").wait_for()
        assert v.page.locator("#chat-input").is_disabled()


def test_errors_are_told_in_words(visit):
    client = FakeClient(says={"break": ("It bre", "error")})
    with running(client) as web:
        v = visit(web)
        v.ask("x" * 300)
        v.page.get_by_text("This model's maximum context length is 256 tokens").wait_for()
        v.page.get_by_role("button", name="New chat", exact=True).first.click()
        v.ask("break")
        v.page.get_by_text("An internal error ended the request").wait_for()
        v.page.get_by_role("button", name="Try again").wait_for()
    v.page.click("#new-chat")
    v.ask("anyone?")
    v.page.get_by_text("The server can't be reached").wait_for()


def test_on_a_phone_by_keyboard_and_in_the_dark(visit):
    with running(FakeClient(MARKDOWN)) as web:
        v = visit(web, viewport={"width": 360, "height": 700}, color_scheme="dark")
        v.page.get_by_text("What would you like").wait_for()
        v.ask("x")
        v.answered()
        assert v.page.evaluate("document.documentElement.scrollWidth") <= 360
        red, *_ = v.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert red < 60
        assert not v.page.locator("#new-chat").is_visible()
        v.page.click("#menu")
        v.page.locator("#new-chat").wait_for()
        v.page.keyboard.press("Escape")
        v.page.locator("#tab-chat").focus()
        v.page.keyboard.press("ArrowRight")
        assert v.page.locator("#complete").is_visible()
        assert v.page.evaluate("document.activeElement.id") == "tab-complete"
        assert v.page.locator("#speed").is_visible() and v.page.locator("#kv").is_visible()


def test_with_the_embedded_model(visit):
    sizes = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--num-blocks", "64"]
    code = "import sys; from jaxllm.serve import main; sys.exit(main(sys.argv[1:]))"
    with serving(*sizes, code=code) as command:
        assert "Chat page: " in command.shown
        v = visit(SimpleNamespace(url=f"http://127.0.0.1:{command.port}"))
        v.page.get_by_role("button", name="reverses a string").click()
        v.page.get_by_role("button", name="Answer anew").wait_for(timeout=120_000)
        assert v.answered().strip() and "tokens" in v.page.locator(".assistant footer").inner_text()
        v.page.click("#tab-complete")
        v.page.get_by_role("button", name="Read a file").click()
        v.page.locator("#complete-more").wait_for(timeout=120_000)
        assert v.page.locator("#output").inner_text().startswith("def read_lines(path")
        assert not v.complaints
        command.process.send_signal(signal.SIGTERM)
        assert command.end() == 0, "an open page holds up no end"
