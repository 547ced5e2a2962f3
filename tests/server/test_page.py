"""The page at `/`: its files, its Markdown run by node, and its behaviour in a real browser with real traffic."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.server.web import PAGE_HEADERS, TYPES, page_files
from tests.server.browser import MISSING, Browser, browsing
from tests.server.rig import FAKE, Server, put_away, serving, spawn, wait_ready
from tests.waiting import HANG_S, eventually, throttled

KEY, OTHER, ADMIN = "sk-page-00000001", "sk-page-00000002", "sk-page-admin-01"
SLOW = ("--device", "20ms")  # of a step of the fake backend
needs_browser = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
OUTSIDE = """
return [...document.querySelectorAll(".card, .bar, .row, table, canvas, button, input, textarea, select")]
  .filter((one) => one.offsetParent && !one.parentElement.closest(".scroll, .table, pre"))
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5 || one.getBoundingClientRect().left < -0.5)
  .map((one) => one.id || one.className || one.tagName)
"""
# With a running request, in the same call: the page removes the row when the next state arrives.
WIDER = """
const running = document.getElementById("running"), wasHidden = running.hidden, row = document.createElement("tr");
const texts = ["normal, waits", "128,000", "127,968", "100,000", "1,234", "4,000", "99 min", "x"];
row.innerHTML = "<th>req_0123456789abcdef x8</th>" + texts.map((text) => "<td class=n>" + text + "</td>").join("");
running.tBodies[0].append(row);
running.hidden = false;
try {
return [...document.querySelectorAll(".scroll, .card, .log, .tiers, .figure .note")]
  .filter((one) => one.offsetParent && one.scrollWidth > one.clientWidth + 1).map((one) => one.id || one.className)
} finally { row.remove(); running.hidden = wasHidden; }
"""
BELOW = """
const chat = ["text", "send", "new-chat", "system", "temperature", "max-tokens", "model"];
return [...chat, "figures", "map", "requests-title", "models"].filter((id) => {
  const box = document.getElementById(id).getBoundingClientRect();
  return !box.height || box.bottom > innerHeight || box.top < 0;
})
"""
DRAWN = "const map = document.getElementById('map'); return map.offsetWidth <= map.parentElement.clientWidth"
SIZES = ((1366, 768), (1024, 768), (768, 1024), (390, 844), (360, 740))
CALM = "return document.getElementById('stop').hidden && !document.querySelector('[aria-busy=true]')"


# Its files


def test_every_file_is_served_to_anyone_and_nothing_else_is(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--api-key", KEY) as server:
        page = server.get("/")
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for name, body in page_files().items():
            answer = server.get(f"/page/{name}")
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers["content-type"] == TYPES[Path(name).suffix]
            assert answer.headers["content-security-policy"] == PAGE_HEADERS["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        for name in ("__init__.py", "..%2Fapp.py", "nothing.js", "%2e%2e%2fdocs.html", ""):
            assert server.get(f"/page/{name}").status in (401, 404), name
        docs = server.get("/docs", headers={"x-api-key": KEY})
        assert docs.status == 200
        assert b'<a href="./">' in docs.body  # back to the page


def test_it_is_self_contained() -> None:
    files = page_files()
    names = {name for text in files.values() for name in re.findall(r'(?:page/|\./)([\w.]+\.\w+)"', text.decode())}
    assert names <= files.keys()
    html = files["index.html"].decode()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", html)
    for name, data in files.items():
        text = data.decode()
        hosts = set(re.findall(r"\w+://[\w.]+", text)) - {"http://www.w3.org"}
        assert not hosts, f"{name} names {hosts}"
        assert not re.search(r"url\(|@import", text), name
        unsafe = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "DOMParser")
        assert not [word for word in unsafe if word in text], name
        assert "localStorage" not in text or name == "storage.js"  # one file that survives its failures
        assert len(data) < 16 << 10, f"{name} has grown: another file?"
    directives = dict(part.strip().split(" ", 1) for part in PAGE_HEADERS["content-security-policy"].split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert "unsafe" not in PAGE_HEADERS["content-security-policy"]


# In a browser


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as window:
        yield window


@pytest.fixture
def browser(window: Browser) -> Browser:
    """One for all tests. Each server has a port and so storage of its own: no test sees what another left."""
    window.open("about:blank")
    window.look(1366, 768)
    window.complaints()
    return window


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """A keyless server with a model of random weights, for tests that do not read what it answers."""
    with serving(str(tiny_model), *FAKE) as server:
        yield server


def is_open(browser: Browser) -> bool:
    return bool(browser.run("return !document.getElementById('main').hidden"))


def open_page(browser: Browser, server: Server) -> None:
    """With no conversation stored."""
    browser.open(server.url)
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.open(server.url)
    browser.wait("the page opens by itself", lambda: is_open(browser))


def count(browser: Browser, state: str) -> int:
    text = browser.text(f"#count-{state}").replace(",", "")
    return int(text) if text.isdigit() else 0


def wait_for_text(browser: Browser, selector: str, text: str) -> None:
    browser.wait(text, lambda: text in browser.text(selector))


def say(browser: Browser, text: str) -> str:
    """Send a message and wait for the end of the answer. Returns what is shown of it."""
    num_turns = "return document.querySelectorAll('#log .turn').length"
    before = browser.run(num_turns)
    browser.type("#text", text + "\n")
    browser.wait("the message is shown", lambda: browser.run(num_turns) == before + 2)
    browser.wait("the answer ends", lambda: browser.run(CALM))
    return str(browser.run("return document.querySelector('#log').lastChild.innerText"))


def check_layout(browser: Browser) -> None:
    """Nothing is wider than the window, in any size and scheme, and dark is dark."""
    papers = set()
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            browser.look(width, height, scheme)
            for view in ("server", "chat"):
                browser.run(f"document.querySelector('#views [data-view={view}]').click()")
                browser.wait("the map is drawn anew", lambda: browser.run(DRAWN))
                assert browser.run("return document.documentElement.scrollWidth") == width, (width, scheme)
                assert browser.run(OUTSIDE) == [], (width, scheme, view)
                assert browser.run(WIDER) == [], (width, scheme, view)
            papers.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(papers) == 2
    browser.look(1366, 768)


# Records what is sent. Answers have to be the same each time, and what is looked at while it runs is made longer.
SPY = """
window.asked = [];
const real = window.fetch;
window.fetch = (path, more) => {
  if (path === "v1/completions")
    return real(path, { ...more, body: JSON.stringify({ ...JSON.parse(more.body), max_tokens: 128 }) });
  if (path !== "v1/chat/completions") return real(path, more);
  const body = JSON.parse(more.body);
  asked.push(body);
  const longer = body.messages.at(-1).content.includes("long story") ? { max_tokens: 8000, ignore_eos: true } : {};
  return real(path, { ...more, body: JSON.stringify({ ...body, temperature: 0, ...longer }) });
};
"""


@needs_browser
def test_real_traffic_on_the_real_model(browser: Browser, default_model: Path) -> None:
    del default_model  # it is on the disk now
    with serving("--kv-memory", "256M") as server:
        open_page(browser, server)
        browser.wait("it is ready", lambda: browser.text("#state") == "ready")
        assert browser.text("#model") == "smollm2-135m-instruct"
        num_blocks = int(server.stats()["num_blocks"])
        browser.wait("all blocks are free", lambda: count(browser, "free") == num_blocks)
        assert browser.run(BELOW) == []  # all of it is above the fold

        browser.run(SPY)
        browser.type("#text", "Write a long story about a fox.")
        browser.click("#send")
        browser.wait("blocks are in use while a request runs", lambda: count(browser, "in_use") > 0)
        browser.wait("the request is listed", lambda: "req_" in browser.text("#requests"))
        assert browser.text("#state") == "working"
        assert browser.text("#tiers") == "waiting:high 0normal 0low 0"
        browser.wait("some of it has come", lambda: len(browser.text("#log .assistant .words")) > 20)
        browser.click("#stop")
        browser.wait("it stops", lambda: "Stopped." in browser.text("#log"))
        browser.wait("its blocks are free or cached", lambda: count(browser, "in_use") == 0)
        assert count(browser, "cached") > 0
        browser.wait("it is a recent request", lambda: "cancelled" in browser.text("#finished"))

        browser.click("#new-chat")
        assert "Tokyo" in say(browser, "What is the capital of Japan?")
        assert "prompt tokens come from the cache" in browser.text("#log .cache")
        answer = say(browser, "And of Italy?")  # the first turn is cached by now
        assert re.search(r"\d+ of \d+ prompt tokens come from the cache", answer)
        recent = "return document.querySelector('#finished tr').innerText"
        browser.wait("its cache result is listed", lambda: re.search(r"[1-9]\d? %", browser.run(recent)))

        assert (
            browser.run("return asked.map((one) => Object.keys(one).sort())")
            == [["cache", "max_tokens", "messages", "model", "stream", "stream_options"]] * 3
        )  # what is not set in the settings is left to the server
        eight_siblings(browser, server)
        check_layout(browser)
        assert browser.complaints() == []


def eight_siblings(browser: Browser, server: Server) -> None:
    def max_holders() -> int:
        engine = server.get("/v1/watch?once=true&interval_ms=100").json["models"][0]["engine"]
        return int(engine["blocks"]["max_holders"]) if engine and engine["blocks"] else 0

    browser.click("#siblings")
    eventually(lambda: max_holders() == 8, "eight hold one block")
    with throttled(server.worker_pid):  # and still do when they are looked at
        browser.wait("eight hold one block", lambda: "shared by up to 8" in browser.text("#map-note"))
        assert count(browser, "shared") > 10
        point_at_shared(browser)
        browser.wait("the holders are counted", lambda: "8 references" in browser.text("#detail"))
        left = "new PointerEvent('pointerleave', { pointerType: 'mouse' })"
        found = browser.text("#detail")
        browser.run(f"document.getElementById('map').dispatchEvent({left})")
        assert re.search(r"Block [\d,]+: shared · 8 references$", found)
        browser.run("document.querySelector('#requests tr').focus()")
        browser.wait("its blocks are marked", lambda: re.match(r"req_\w+ holds \d+ blocks\.", browser.text("#detail")))
        browser.run("document.querySelector('#requests tr').blur()")
    browser.wait("the result", lambda: "shared." in browser.text("#siblings-note"))
    result = re.search(
        r"8 \xd7 ([\d,]+) = ([\d,]+) prompt tokens requested: ([\d,]+) computed, ([\d,]+) shared",
        browser.text("#siblings-note"),
    )
    assert result is not None, browser.text("#siblings-note")
    one, every, computed, shared = (int(text.replace(",", "")) for text in result.groups())
    assert 8 * one == every == computed + shared
    assert one <= computed < one + 8 * 8  # the prompt once, and the last token of each


SHARED_PIXELS = """
const canvas = document.getElementById("map");
const colour = getComputedStyle(document.querySelector(".swatch.shared")).backgroundColor;
const shared = colour.match(/\\d+/g).map(Number);
const copy = document.createElement("canvas");
Object.assign(copy, { width: canvas.width, height: canvas.height });
if (!copy.width || !copy.height) return 0;
const paint = copy.getContext("2d", { willReadFrequently: true });
paint.drawImage(canvas, 0, 0);
const { data, width } = paint.getImageData(0, 0, canvas.width, canvas.height);
const found = [];
for (let at = 0; at < data.length; at += 4) {
  if (shared.every((value, i) => Math.abs(data[at + i] - value) < 4)) found.push(at / 4);
}
"""


def point_at_shared(browser: Browser) -> None:
    """Move the pointer to a shared block, which is found by its colour."""
    script = """
    if (!found.length) return false;
    const box = canvas.getBoundingClientRect(), scale = canvas.width / box.width;
    const x = found[0] % width, y = Math.floor(found[0] / width);
    const where = { clientX: box.left + x / scale + 2, clientY: box.top + y / scale + 2, pointerType: "mouse" };
    canvas.dispatchEvent(new PointerEvent("pointermove", where));
    return true;
    """
    browser.wait("a shared block is drawn", lambda: browser.run(SHARED_PIXELS + script))


@needs_browser
@pytest.mark.parametrize("num_blocks", ["4097", "100001"])
@pytest.mark.kept("4097")
def test_eight_siblings_can_be_seen_in_a_large_pool(browser: Browser, tiny_model: Path, num_blocks: str) -> None:
    with serving(str(tiny_model), "--backend", "fake", "--num-blocks", num_blocks, *SLOW) as server:
        open_page(browser, server)
        num_pixels = SHARED_PIXELS + "return found.length"
        browser.wait("the map is complete", lambda: count(browser, "free") == int(num_blocks) - 1)
        browser.run(SPY)
        browser.click("#siblings")
        with throttled(server.worker_pid):
            browser.wait("eight share", lambda: "shared by up to 8" in browser.text("#map-note"))
            browser.wait("each shared block is large", lambda: browser.run(num_pixels) / count(browser, "shared") > 100)
            assert re.match(r"\d+ of [\d,]+ blocks in use", browser.text("#map-note"))
            point_at_shared(browser)
            browser.wait("it is one block", lambda: re.match(r"Block [\d,]+: shared", browser.text("#detail")))
        browser.click("#siblings")  # stops them
        browser.wait("they stop", lambda: browser.text("#siblings-note") == "Stopped.")
        browser.click("#zoom")
        browser.wait("the whole pool", lambda: "blocks a cell" in browser.text("#map-note"))
        assert browser.complaints() == []


# Chat


SCRIPTED = """
window.asked = [];
const real = window.fetch, answers = arguments[0];
window.fetch = async (path, more) => {
  if (path !== "v1/chat/completions" || !answers.length) return real(path, more);
  asked.push(JSON.parse(more.body));
  const chunks = answers.shift().map(([delta, finish_reason]) => ({ choices: [{ index: 0, delta, finish_reason }] }));
  const frames = [...chunks.map((one) => JSON.stringify(one)), "[DONE]"];
  return new Response(frames.map((one) => `data: ${one}\\n\\n`).join(""));
};
"""


def script_answers(browser: Browser, *texts: str) -> None:
    """The browser itself makes up the answers, in pieces of seven characters."""
    answers = []
    for text in texts:
        pieces = [[{"content": text[at : at + 7]}, None] for at in range(0, len(text), 7)]
        answers.append([*pieces, [{}, "stop"]])
    browser.run(SCRIPTED, answers)


MARKDOWN = """# Heading

A **bold**, *slanted*, ***both*** and `inline <code>` text, snake_case_name, 2 * 3 * 4.

1. first
2. second
   - inside
   - also

```python
def f(x):
    return "<b>" + x
```

| name | size |
|------|-----:|
| a    | `1`  |

> quoted

See [the page](https://example.org/a_(b)) and https://example.org/c.
"""


@needs_browser
def test_answers_are_shown_as_markdown(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    script_answers(browser, MARKDOWN)
    say(browser, "Show me.")

    links = "return [...document.querySelectorAll('#log a')].map((one) => [one.href, one.rel, one.target])"
    rel = "noopener noreferrer nofollow"
    assert browser.run(links) == [
        ["https://example.org/a_(b)", rel, "_blank"],
        ["https://example.org/c", rel, "_blank"],
    ]
    copied = "window.copied = []; navigator.clipboard.writeText = async (text) => void copied.push(text)"
    browser.run(copied)
    browser.click("#log .code button")
    browser.click("#log .actions button")
    browser.wait("both are copied", lambda: browser.run("return copied.length") == 2)
    assert browser.run("return copied") == ['def f(x):\n    return "<b>" + x', MARKDOWN]
    browser.wait("it is confirmed", lambda: "Copied" in browser.text("#log .code-head"))
    assert browser.complaints() == []


EVIL = """<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>

<iframe src="javascript:parent.hit = 1"></iframe>
[a](javascript:window.hit=1) [b](JaVaScRiPt:hit) [c](data:text/html,<script>1</script>) [d](//evil.example) [e](/docs)
![f](javascript:1) ![g](https://evil.example/pixel.png) <a href="javascript:1">h</a> <https://evil.example/i>
[x" onmouseover="window.hit=1](https://evil.example/"onclick="hit)
**<b onclick=hit>** `<svg onload=hit>` &lt;img src=x&gt;

```html" onclick="window.hit=1
<script>window.hit = 1</script>
```

| <img src=x onerror=hit> |
|---|
| <style>*{display:none}</style> |

# <form action=javascript:hit><button>
1. <base href=//evil.example>
"""


@needs_browser
def test_nothing_in_an_answer_becomes_markup(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    script_answers(browser, EVIL)
    assert "<script>window.hit = 1</script>" in say(browser, EVIL.replace("\n", " "))  # as text
    tags = set(browser.run("return [...document.querySelectorAll('#log .words *')].map((one) => one.tagName)"))
    safe = {"P", "A", "STRONG", "CODE", "PRE", "DIV", "SPAN", "BUTTON", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}
    assert tags <= safe | {"H3", "OL", "LI", "EM"}
    names = browser.run(
        "return [...document.querySelectorAll('#log .words *')].flatMap((one) => one.getAttributeNames())"
    )
    assert set(names) <= {"class", "href", "rel", "target", "title", "tabindex", "type", "aria-label", "start"}
    addresses = browser.run("return [...document.querySelectorAll('#log a')].map((one) => one.getAttribute('href'))")
    assert addresses
    assert all(address.startswith("https://evil.example/") for address in addresses)
    assert browser.run("return window.hit") is None
    assert browser.complaints() == []  # the policy had nothing to stop


@needs_browser
def test_history_survives_a_reload_and_can_be_deleted(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    script_answers(browser, "The **first** answer.", "The second.", "Of another chat.")
    browser.type("#system", "Be brief.")
    browser.type("#temperature", "0.5")
    say(browser, "First question")
    say(browser, "Second question")
    first = {"role": "user", "content": "First question"}
    assert browser.run("return asked[1].messages") == [
        {"role": "system", "content": "Be brief."},
        first,
        {"role": "assistant", "content": "The **first** answer."},
        {"role": "user", "content": "Second question"},
    ]
    assert browser.run("return [asked[1].temperature, asked[1].max_tokens]") == [0.5, 512]
    browser.click("#new-chat")
    assert "What would you like to ask?" in browser.text("#log")
    say(browser, "Another chat")
    titles = "return [...document.querySelectorAll('#chats .open span')].map((one) => one.textContent)"
    assert browser.run(titles) == ["Another chat", "First question"]

    browser.open(server.url)
    browser.wait("it opens again", lambda: is_open(browser))
    assert browser.run(titles) == ["Another chat", "First question"]
    assert "Of another chat." in browser.text("#log")
    browser.click("#chats li:nth-child(2) .open")
    assert "The first answer." in browser.text("#log")
    assert browser.run("return document.querySelector('#log strong').textContent") == "first"
    assert browser.run("return document.getElementById('system').value") == "Be brief."
    browser.click("#chats li:nth-child(1) .remove")
    assert browser.run(titles) == ["First question"]
    browser.run("window.confirm = () => true")
    browser.click("#clear-chats")
    assert browser.run(titles) == []
    assert browser.run("return Object.keys(localStorage)") == []
    assert "What would you like to ask?" in browser.text("#log")
    assert browser.complaints() == []


@needs_browser
def test_regenerate_asks_again_and_replaces_the_answer(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    script_answers(browser, "One.", "Two.", "Three.")
    say(browser, "Count.")
    browser.click("#log .regenerate")
    browser.wait("a new answer", lambda: "Two." in browser.text("#log") and browser.run(CALM))
    assert "One." not in browser.text("#log")
    assert browser.run("return JSON.stringify(asked[0]) === JSON.stringify(asked[1])")
    say(browser, "Go on.")
    assert browser.run("return document.querySelectorAll('#log .regenerate').length") == 1  # of the last answer only
    assert [one["content"] for one in browser.run("return asked[2].messages")] == ["Count.", "Two.", "Go on."]


@needs_browser
@pytest.mark.parametrize(
    ("failure", "note"),
    [("QuotaExceededError", "storage of this browser is full"), ("SecurityError", "does not store")],
)
def test_chat_works_without_storage(browser: Browser, server: Server, failure: str, note: str) -> None:
    open_page(browser, server)
    script_answers(browser, "An answer.", "Another.")
    browser.run(
        "const name = arguments[0]; Storage.prototype.setItem = () => { throw new DOMException('no', name); }", failure
    )
    assert "An answer." in say(browser, "Hello")
    assert note in browser.text("#history-note")
    browser.click("#new-chat")
    assert "Another." in say(browser, "Hello again")
    browser.click("#chats li:nth-child(2) .open")  # kept in memory
    assert "An answer." in browser.text("#log")
    assert browser.complaints() == []


@needs_browser
def test_settings_out_of_range_are_explained_and_nothing_is_sent(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    script_answers(browser, "Yes.")
    browser.type("#temperature", "3")
    browser.type("#text", "Hello\n")
    browser.wait("it is explained", lambda: "from 0 to 2" in browser.text("#settings-problem"))
    assert browser.run("return [asked.length, document.getElementById('text').value]") == [0, "Hello"]
    browser.run("document.getElementById('temperature').value = ''; document.getElementById('max-tokens').value = ''")
    browser.click("#send")
    browser.wait("it is sent", lambda: browser.run("return asked.length") == 1)
    assert not {"temperature", "max_tokens"} & {*browser.run("return Object.keys(asked[0])")}  # the server's defaults


@needs_browser
def test_reasoning_calls_and_cuts_are_shown(browser: Browser, server: Server) -> None:
    """No model here reasons, so the browser itself makes up the answers."""
    open_page(browser, server)
    thought = [{"reasoning_content": "Hm, <b>a"}, None], [{"reasoning_content": " fox."}, None]
    call = [{"tool_calls": [{"index": 0, "function": {"name": "look_up", "arguments": "{}"}}]}, "tool_calls"]
    refusal = [[{"refusal": "I will not."}, "stop"]]
    browser.run(SCRIPTED, [[*thought, [{"content": "A fox."}, "stop"]], [call], [*thought, [{}, "length"]], refusal])
    assert say(browser, "Who?").split()[:5] == ["Hm,", "<b>a", "fox.", "A", "fox."]
    colour = "return getComputedStyle(document.querySelector(arguments[0])).color"
    assert browser.run(colour, "#log .thoughts") == browser.run(colour, ".note") != browser.run(colour, "#log .words")
    assert "The model called look_up." in say(browser, "Look.")
    assert "Cut off at the limit of 512 tokens, before the answer began." in say(browser, "Think.")
    assert "The model refused: I will not." in say(browser, "Do.")
    answered = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A fox."}]
    assert browser.run("return asked.at(-1).messages") == [*answered, {"role": "user", "content": "Do."}]


@needs_browser
def test_a_phone_shows_the_chat_first(browser: Browser, server: Server) -> None:
    browser.look(390, 844)
    open_page(browser, server)
    script_answers(browser, "An answer. " * 200)
    say(browser, "Hello")
    visible = """
    return arguments[0].map((selector) => {
      const box = document.querySelector(selector).getBoundingClientRect();
      return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && box.right <= innerWidth;
    })
    """
    assert browser.run("return [scrollY, document.documentElement.scrollHeight]") == [0, 844]
    assert browser.run(visible, ["#text", "#send", "#log", "#settings", "#model"]) == [True] * 5
    assert browser.run(visible, ["#map", "#models"]) == [False] * 2
    assert browser.run("return document.getElementById('log').clientHeight") > 844 / 2
    browser.click("#history-button")
    assert browser.run(visible, ["#new-chat", "#chats"]) == [True] * 2
    browser.click("#new-chat")
    assert browser.run(visible, ["#new-chat", "#text"]) == [False, True]
    browser.click("#views [data-view=server]")
    assert browser.run(visible, ["#figures", "#map", "#text"]) == [True, True, False]
    browser.click("#views [data-view=chat]")
    assert browser.run(visible, ["#text"]) == [True]
    assert browser.complaints() == []


# States


@needs_browser
def test_a_key_is_asked_for_explained_and_kept_for_the_tab(browser: Browser, tiny_model: Path) -> None:
    keys = ("--api-key", KEY, "--api-key", OTHER, "--admin-api-key", ADMIN)
    with serving(str(tiny_model), *FAKE, *SLOW, *keys, key=OTHER) as server, ExitStack() as stack:
        browser.open(server.url)
        browser.wait("it asks", lambda: browser.run("return !document.getElementById('key-form').hidden"))
        assert "This server requires an API key." in browser.text("#key-form")
        assert not is_open(browser)
        assert "tiny" not in browser.text("body")  # nothing is shown before
        for wrong, why in (
            ("\n", "Enter a key."),
            ("sk-1\n", "at least 8 characters; this has 4"),
            ("sk-wrong and more\n", "no spaces"),
            ("sk-wrong-0000001\n", "does not accept this key (16 characters)"),
        ):
            browser.run("document.getElementById('key').value = ''")
            browser.type("#key", wrong)
            wait_for_text(browser, "#key-note", why)
            assert not is_open(browser)
        browser.type("#key", "Bearer " + KEY + "\n")
        browser.wait("the right one opens", lambda: is_open(browser))
        assert browser.text("#key-button") == "Key: key-1"
        assert browser.run(
            "return [...document.querySelectorAll('#models button')].every((one) => one.offsetParent === null)"
        )
        stack.enter_context(server.begin(endless()))
        counted = "1 more request of other keys"
        browser.wait("another key's request is counted", lambda: counted in browser.text("#requests-note"))
        assert "req_" not in browser.text("#requests")  # and not shown

        browser.open(server.url)
        browser.wait("the tab still has it", lambda: is_open(browser))
        browser.wait("an admin key is offered", lambda: "An admin key is needed" in browser.text("#models-note"))
        browser.click("#models-note button")
        browser.type("#key", OTHER + "\n")
        browser.wait("it is no admin key", lambda: "is valid, but it is not an admin key" in browser.text("#key-note"))
        browser.type("#key", "sk-wrong-0000001\n")
        browser.wait("a wrong one", lambda: "does not accept this key" in browser.text("#key-note"))
        browser.wait("the one before is used again", lambda: browser.text("#key-button") == "Key: key-2")
        browser.type("#key", ADMIN + "\n")
        browser.wait("an admin", lambda: browser.text("#key-button") == "Key: admin-1 (admin)")
        assert browser.run("return document.getElementById('key-form').hidden")
        browser.click("#key-button")
        browser.click("#key-forget")
        browser.wait("it asks again", lambda: "requires an API key" in browser.text("#key-about"))
        assert not is_open(browser)
        refused = [text for text in browser.complaints() if "401" not in text]  # the browser itself reports a 401
        assert refused == []


def endless() -> dict[str, Any]:
    message = {"role": "user", "content": "Hi"}
    return {"messages": [message], "max_tokens": 3000, "ignore_eos": True, "stream": True}


@needs_browser
def test_a_running_request_can_be_cancelled(browser: Browser, tiny_model: Path) -> None:
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN)
    with serving(str(tiny_model), *FAKE, *SLOW, *keys, key=KEY) as server, server.begin(endless()) as sock:
        browser.open(server.url)
        browser.wait("it asks", lambda: browser.run("return !document.getElementById('key-form').hidden"))
        browser.type("#key", ADMIN + "\n")
        browser.wait("the request is listed", lambda: "req_" in browser.text("#requests"))
        browser.click("#requests .remove")
        browser.wait("it ends", lambda: browser.text("#requests") == "")
        browser.wait("and is a recent request", lambda: "cancelled" in browser.text("#finished"))
        sock.settimeout(60)
        data = b""
        while piece := sock.recv(65536):
            data += piece
            if b"cancelled by an admin" in data:
                break
        assert b"cancelled by an admin" in data
        refused = re.compile("401|v1/watch/held.* 404")  # without a key; the blocks of a request that has just ended
        assert [text for text in browser.complaints() if not refused.search(text)] == []


@needs_browser
def test_several_models_are_loaded_pinned_and_unloaded(browser: Browser, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "second")
    shutil.copytree(tiny_model, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights")
    with serving(str(tiny_model), str(tmp_path / "second"), str(tmp_path / "broken"), *FAKE) as server:

        def press(name: str) -> None:
            there = f"return Boolean(document.querySelector('[aria-label=\"{name}\"]')?.offsetParent)"
            browser.wait(name, lambda: browser.run(there))
            browser.run(f"document.querySelector('[aria-label=\"{name}\"]').click()")

        def badge() -> str:
            return str(browser.run("return document.querySelectorAll('#models .badge')[1].textContent"))

        def choose(number: int) -> None:
            browser.run(
                "const one = document.getElementById('model'); one.selectedIndex = arguments[0];"
                "one.dispatchEvent(new Event('change'))",
                number,
            )

        open_page(browser, server)
        browser.wait("all are there", lambda: browser.text("#model") == "tinysecondbroken")
        choose(1)
        browser.wait("the second is not loaded", lambda: browser.text("#state") == "not loaded")
        assert browser.text("#banner-text") == "second is not loaded. The next request loads it."
        assert count(browser, "free") == 0  # and has no blocks to show
        assert browser.text("#requests-note") == "The model is not loaded."
        browser.click("#banner-action")
        browser.wait("it is loaded", lambda: badge() == "ready" and browser.text("#state") == "ready")
        browser.wait("the banner is hidden", lambda: browser.run("return document.getElementById('banner').hidden"))
        browser.wait("with its blocks", lambda: count(browser, "free") == 399)
        assert re.search(r"in use of .* for all models", browser.text("#memory"))
        press("Pin second")
        browser.wait("it is pinned", lambda: badge() == "ready, pinned")
        press("Unload second")
        browser.wait("a pinned model stays", lambda: "unpin it first" in browser.text("#models"))
        press("Unpin second")
        browser.wait("it is not pinned", lambda: badge() == "ready")
        press("Unload second")
        browser.wait("it is unloaded", lambda: badge() == "not loaded")
        choose(2)
        browser.wait("not loaded either", lambda: browser.text("#banner-text").startswith("broken is not loaded."))
        browser.click("#banner-action")
        browser.wait("it fails, with a reason", lambda: "broken could not be loaded: " in browser.text("#banner-text"))
        assert browser.text("#state") == "failed"
        assert browser.text("#banner-action") == "Try again"
        complaints = [text for text in browser.complaints() if not re.search(r"status of (400|5\d\d)", text)]
        assert complaints == []


LOADING = """
import("./page/modelstate.js").then(({ showBanner, stateOf }) => {
  const model = { name: "big", state: "loading", progress: 0.43, eta_s: 12.3, num_waiting: 2, engine: null };
  const changes = [{}, { progress: null }, { eta_s: null, num_waiting: 1 }, { state: "unloading" },
    { state: "unloaded", num_waiting: 0 }, { state: "failed" }];
  const states = changes.map((change) => stateOf({ ...model, ...change }, arguments[0]));
  window.states = states.map((one) => [one.label, one.text, one.action]);
  showBanner("big", states[0]);
  window.width = document.querySelector("#banner-meter i").style.width;
});
"""


@needs_browser
def test_states_of_a_model_are_explained(browser: Browser, server: Server) -> None:
    """A load takes as long as it takes, so its states are made up."""
    open_page(browser, server)
    browser.run(LOADING, {"is_draining": False, "is_admin": False})
    browser.wait("the module is there", lambda: browser.run("return Boolean(window.states)"))
    assert browser.run("return [states, window.width]") == [
        [
            ["loading 43 %", "Loading big: 43 %, about 13 s left. 2 requests wait for it.", ""],
            ["loading", "Waiting for memory or for another model to load. 2 requests wait for it.", ""],
            ["loading 43 %", "Loading big: 43 %. 1 request waits for it.", ""],
            ["unloading", "big is unloading. 2 requests wait for it.", ""],
            ["not loaded", "big is not loaded. The next request loads it.", ""],  # no button: not an admin
            ["failed", "big could not be loaded. The server's log has the reason.", ""],
        ],
        "43%",
    ]


@needs_browser
def test_it_comes_back_with_the_server_and_shows_names_as_text(browser: Browser, tiny_model: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    with serving(str(tiny_model), *FAKE, "--served-model-name", evil) as first:
        open_page(browser, first)
        assert browser.text("#model") == evil
        assert browser.run("return document.querySelectorAll('#model img, #models img, #banner img').length") == 0
        port = str(first.address[1])
        first.stop()
        browser.wait("it reports the lost connection", lambda: "no connection" in browser.text("#state"))
        assert "No connection to the server" in browser.text("#banner-text")
        assert "The server does not respond." in say(browser, "Hello?")
    second: Server = spawn(str(tiny_model), *FAKE, "--port", port, "--served-model-name", "another")
    try:
        wait_ready(second)
        browser.wait("it is back, and shows the new model", lambda: browser.text("#model") == "another")
        browser.wait("it is ready", lambda: browser.text("#state") == "ready")
        browser.click("#log .regenerate")
        browser.wait(
            "the question is answered now", lambda: browser.run(CALM) and "tokens in" in browser.text("#log .pace")
        )
    finally:
        put_away(second)


@needs_browser
def test_it_works_with_the_keyboard_and_every_control_has_a_name(browser: Browser, server: Server) -> None:
    open_page(browser, server)
    script_answers(browser, "An answer.")
    say(browser, "Hello")
    nameless = """
    return [...document.querySelectorAll("button, input, textarea, select, a, canvas")]
      .filter((one) => one.offsetParent)
      .filter((one) => !(one.textContent.trim() || one.getAttribute("aria-label") || (one.labels && one.labels.length)))
      .map((one) => one.outerHTML)
    """
    assert browser.run(nameless) == []
    low = browser.run(CONTRAST)
    assert low == []
    browser.look(1366, 768, "dark")
    assert browser.run(CONTRAST) == []


CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map((value) => {
    const share = Number(value) / 255;
    return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paperOf = (node) => {
  for (let one = node; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
  return "rgb(255, 255, 255)";
};
const hasText = (one) => [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
const isShown = (one) => one.offsetParent && hasText(one) && !one.disabled;
return [...document.querySelectorAll("body *")].filter(isShown).filter((one) => {
  const [a, b] = [light(getComputedStyle(one).color), light(paperOf(one))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05) < 4.5;
}).map((one) => one.tagName + " " + one.className + " " + one.textContent.slice(0, 40));
"""


HARNESS = Path(__file__).with_name("markdown.mjs")
NODE = shutil.which("node")
SMALL, LARGE = 4_000, 16_000

PIECES = (
    "~", "~~~", "~~~ ", "~~~\n", "~~a", "*", "_", "`", "``", "[", "]", "<", "|", ">", "(", ")", "!", "![", "\\", "#",
    "-", "- ", "* ", "1. ", "> ", "> > ", "*a ", "**a", "***a", "_a", "__a", "~~a ", "`a``", "[a](", "![x](", "[a](b ",
    '[a](b "', "[[a](x)", "](", "https://", "http://%", "http://% ", "http://a.", "|a", "a|b\n", "|-|\n", "|\n", "a\n",
    "- a\n", "  - a\n", "> a\n", "```\n", "# a\n", "---\n", "- - -x\n", "# \u2028", "<!--", "\\`", "*`", "  \n", "a*b_",
)  # fmt: skip
# Texts of about n characters that a search from each place, or a regular expression that tries again, reads n times.
SHAPES: dict[str, Callable[[int], str]] = {
    "a fence and a backtick": lambda n: "~" * n + "`",
    "a fence, blanks and a backtick": lambda n: "~~~" + " " * n + "`",
    "a fence of backticks, blanks and one more": lambda n: "```" + " " * n + "x`",
    "code that begins with a blank": lambda n: "` " + "a" * n + "`",
    "code of blanks": lambda n: "` " + " " * n + "a`",
    "a heading with a line separator": lambda n: "#" + " " * n + "\u2028",
    "an address with dots inside": lambda n: "http://a" + "." * n + "a",
    "brackets before a far end": lambda n: "[" * (n // 2) + "a" * (n // 2) + "](",
    "brackets and a link": lambda n: "[a" * (n // 4) + "a" * (n // 2) + "](x)",
    "backticks of each length": lambda n: " ".join("`" * i for i in range(1, int((2 * n) ** 0.5))),
    "stars of each length": lambda n: " a".join("*" * i for i in range(1, int((2 * n) ** 0.5))),
    "deep lists": lambda n: "\n".join("  " * i + "- a" for i in range(int(n**0.5))),
    "deep quotes": lambda n: ">" * n,
    "almost a rule": lambda n: "- " * (n // 2) + "x",
    "a far item": lambda n: " " * n + "-x",
    "a wide table": lambda n: "|a" * (n // 4) + "\n" + "|-" * (n // 4),
    "short rows of a wide table": lambda n: "|a" * 40 + "|\n" + "|-" * 40 + "|\n" + "|\n" * (n // 2),
    "lines that are almost tables": lambda n: "|a\n|-x\n" * (n // 7),
    "fences in items": lambda n: "- ```\n" * (n // 6),
    "an address with parentheses": lambda n: "[a](https://a.b" + "(b)" * (n // 3),
    "titles without end": lambda n: '[a](https://a.b "x' * (n // 18),
    "emphasis in emphasis": lambda n: "*a **b " * (n // 14) + "c** d*" * (n // 14),
}
# Those whose work is in regular expressions, which the harness does not count.
BACKTRACKING = [*SHAPES][:7]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NODE is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("page")
    (folder / "package.json").write_text('{"type": "module"}')
    for name, data in page_files().items():
        (folder / name).write_bytes(data)
    return folder / "markdown.js"


def render(module: Path, texts: Sequence[str]) -> list[Any]:
    """Steps and nodes of each text. A search that reads a large text again and again ends at the limit."""
    command = [str(NODE), str(HARNESS), str(module)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def growth(module: Path, make: dict[str, Callable[[int], str]]) -> dict[str, float]:
    """By how much the steps grow when the text is four times as long."""
    small, large = (render(module, [one(size) for one in make.values()]) for size in (SMALL, LARGE))
    return {name: b["steps"] / a["steps"] for name, a, b in zip(make, small, large, strict=True)}


def repeated(piece: str) -> Callable[[int], str]:
    return lambda n: (piece * (n // len(piece) + 1))[:n]


def test_the_work_grows_with_the_text(module: Path) -> None:
    found = growth(module, SHAPES | {repr(piece): repeated(piece) for piece in PIECES})
    assert {name: ratio for name, ratio in found.items() if ratio > 5} == {}  # four times the text; its square: 16


@pytest.mark.parametrize("name", BACKTRACKING)
def test_no_expression_tries_a_long_text_again(module: Path, name: str) -> None:
    """A million characters: with a try for each of them this takes an hour, without a second."""
    (found,) = render(module, [SHAPES[name](1_000_000)])
    assert found["steps"] < 30_000_000


@pytest.mark.nightly
def test_a_hundred_thousand_nodes_are_rendered(module: Path) -> None:
    """As arguments of one call they would be too many."""
    texts = [piece * 150_000 for piece in ("- a\n", "*a* ", "> - a\n", "|a|\n|-|\n|a|\n", "a\n\n")]
    assert [one["steps"] > 150_000 for one in render(module, texts)] == [True] * len(texts)


MEANINGS: tuple[tuple[str, Any], ...] = (
    ("**a** *b* ***c*** `<d>` e_f_g, 2 * 3 * 4.", [["p", ["strong", "a"], " ", ["em", "b"], " ",
        ["strong", ["em", "c"]], " ", ["code", "<d>"], " e_f_g, 2 * 3 * 4."]]),
    ("1. a\n2. b\n   - c\n   - d", [["ol", ["li", "a"], ["li", "b", ["ul", ["li", "c"], ["li", "d"]]]]]),
    ("> a", [["blockquote", ["p", "a"]]]),
    ("` a `", [["p", ["code", "a"]]]),
    ("`  `", [["p", ["code", "  "]]]),
    ("` a`", [["p", ["code", " a"]]]),
    ("``a`b`` `c`", [["p", ["code", "a`b"], " ", ["code", "c"]]]),
    ("`a ``b`", [["p", ["code", "a ``b"]]]),
    ("`a``", [["p", "`a``"]]),
    ("\\`a` b`", [["p", "`a", ["code", " b"]]]),
    ("~~~ py x\na\n~~~", [["div", ["div", ["span", "py"], ["button", "Copy"]], ["pre", ["code", "a"]]]]),
    ("```a`", [["p", "```a`"]]),
    ("~~~a`b", [["p", "~~~a`b"]]),
    ("# a", [["h3", "a"]]),
    ("###", [["h5"]]),
    ("#a", [["p", "#a"]]),
    ("####### a", [["p", "####### a"]]),
    ("https://a.b/c.. d", [["p", ["a", "https://a.b/c"], ".. d"]]),
    ("http://%http://a.b c", [["p", "http://%http://a.b c"]]),
    ("http://% http://a.b", [["p", "http://% ", ["a", "http://a.b"]]]),
    ("[[a](https://a.b)", [["p", "[", ["a", "a"]]]),
    ("[a] [b](https://a.b)", [["p", "[a] ", ["a", "b"]]]),
    ("- a\n  - b\n- c", [["ul", ["li", "a", ["ul", ["li", "b"]]], ["li", "c"]]]),
    ("-\n- b", [["ul", ["li"], ["li", "b"]]]),
    ("|a|b|\n|-|-|\n|c|\n|d|e|f|", [["div", ["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]],
        ["tbody", ["tr", ["td", "c"]], ["tr", ["td", "d"], ["td", "e"]]]]]]),
)  # fmt: skip


def test_what_marks_mean(module: Path) -> None:
    found = render(module, [text for text, _ in MEANINGS])
    assert [(text, one["nodes"]) for (text, _), one in zip(MEANINGS, found, strict=True)] == list(MEANINGS)
