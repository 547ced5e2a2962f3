"""The page at `/`: its files, and its behaviour in a real browser with the real model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire.server.web.page import CONTENT_SECURITY_POLICY, TYPES, page_files
from tests.server.browser import MISSING, Browser, browsing
from tests.server.rig import FAKE, Server, put_away, serving, spawn, wait_ready
from tests.waiting import eventually, throttled

KEY, OTHER = "sk-page-00000001", "sk-page-00000002"
needs_browser = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
OUTSIDE = """
return [...document.querySelectorAll(".card, .bar, .row, table, canvas")].filter((one) => one.offsetParent
  && !one.parentElement.closest(".scroll") && one.getBoundingClientRect().right > innerWidth + 0.5).length
"""
WIDER = """
return [...document.querySelectorAll(".scroll, .figure .note, thead th, .tiers")]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.id || one.textContent)
"""
DRAWN = "const map = document.getElementById('map'); return map.offsetWidth <= map.parentElement.clientWidth"
SIZES = ((1280, 900), (768, 1024), (360, 740))


# Files


def test_only_the_pages_files_are_served_without_a_key(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--api-key", KEY) as server:
        page = server.get("/")
        assert page.status == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for name, body in page_files().items():
            answer = server.get(f"/page/{name}")
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers["content-type"] == TYPES[Path(name).suffix]
            assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
        for name in ("__init__.py", "..%2Fapp.py", "nothing.js", "%2e%2e%2fdocs.html", ""):
            assert server.get(f"/page/{name}").status in (401, 404), name
        assert server.get("/docs", headers={"x-api-key": KEY}).status == 200


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
        unsafe = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "localStorage")
        assert not [word for word in unsafe if word in text], name
        assert len(data) < 16 << 10, f"{name} has grown: another file?"
    directives = dict(part.strip().split(" ", 1) for part in CONTENT_SECURITY_POLICY.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_every_id_used_by_a_script_exists() -> None:
    files = page_files()
    there = set(re.findall(r'\bid="([\w-]+)"', files["index.html"].decode()))
    scripts = "".join(data.decode() for name, data in files.items() if name.endswith(".js"))
    wanted = set(re.findall(r'byId\("([\w-]+)"\)', scripts))
    assert wanted <= there


# In a browser


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as window:
        yield window


@pytest.fixture
def browser(window: Browser) -> Browser:
    """One browser for all tests, reset between them."""
    window.open("about:blank")
    window.look(1280, 900)
    window.complaints()
    return window


def is_open(browser: Browser) -> bool:
    return bool(browser.run("return !document.getElementById('main').hidden"))


def count(browser: Browser, state: str) -> int:
    text = browser.text(f"#count-{state}").replace(",", "")
    return int(text) if text.isdigit() else 0


def check_layout(browser: Browser) -> None:
    """Check that nothing is wider than the window, in all sizes and schemes, and that the dark scheme is dark."""
    papers = set()
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            browser.look(width, height, scheme)
            browser.wait("the map is drawn anew", lambda: browser.run(DRAWN))
            assert browser.run("return document.documentElement.scrollWidth") == width, (width, scheme)
            assert browser.run(OUTSIDE) == 0, (width, scheme)
            assert browser.run(WIDER) == [], (width, scheme)
            papers.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(papers) == 2
    browser.look(1280, 900)


# The page uses the model's sampling defaults; the tests need the same answers each time, and longer ones to observe.
GREEDY = """
window.asked = [];
const real = window.fetch;
window.fetch = (path, more) => {
  if (path === "v1/completions")
    return real(path, { ...more, body: JSON.stringify({ ...JSON.parse(more.body), max_tokens: 128 }) });
  if (path !== "v1/chat/completions") return real(path, more);
  const body = JSON.parse(more.body);
  asked.push(Object.keys(body).sort());
  const longer = body.messages.at(-1).content.includes("long story") ? { max_tokens: 8000, ignore_eos: true } : {};
  return real(path, { ...more, body: JSON.stringify({ ...body, temperature: 0, ...longer }) });
};
"""


@needs_browser
def test_real_traffic_on_the_real_model(browser: Browser, default_model: Path) -> None:
    del default_model  # is here now
    with serving("--kv-memory", "256M") as server:
        browser.open(server.url)
        browser.wait("the page opens by itself", lambda: is_open(browser))
        assert browser.text("#tabs") == "smollm2-135m-instruct"
        browser.wait("it is ready", lambda: browser.text("#state") == "ready")
        num_blocks = int(server.stats()["num_blocks"])
        browser.wait("all blocks are free", lambda: count(browser, "free") == num_blocks)

        browser.run(GREEDY)
        browser.type("#text", "Write a long story about a fox.")
        browser.click("#send")
        browser.wait("blocks are in use while a request runs", lambda: count(browser, "in_use") > 0)
        browser.wait("the request is listed", lambda: "req_" in browser.text("#requests"))
        assert browser.text("#state") == "working"
        assert browser.text("#tiers") == "waiting:high 0normal 0low 0"
        browser.click("#stop")
        browser.wait("it stops", lambda: "stopped" in browser.text("#log"))
        browser.wait("its blocks are free or cached", lambda: count(browser, "in_use") == 0)
        assert count(browser, "cached") > 0

        browser.click("#forget")
        browser.type("#text", "What is the capital of France?")
        browser.click("#send")
        browser.wait("it answers", lambda: "Paris" in browser.text("#log"))
        explanation = browser.wait("the cache is explained", lambda: browser.text("#log .cache"))
        assert "prompt tokens come from the cache" in explanation
        browser.type("#text", "And of Italy?\n")  # Enter sends
        second = "return document.querySelectorAll('#log .cache').length > 1"
        browser.wait("a second answer", lambda: browser.run(second))
        again = browser.run("return [...document.querySelectorAll('#log .cache')].at(-1).textContent")
        assert re.match(r"\d+ of \d+ prompt tokens come from the cache", again)  # the first turn is cached

        assert (
            browser.run("return asked")
            == [["cache", "max_tokens", "messages", "model", "stream", "stream_options"]] * 3
        )
        eight_siblings(browser, server)
        check_layout(browser)
        assert browser.complaints() == []


def eight_siblings(browser: Browser, server: Server) -> None:
    def max_holders() -> int:
        engine = server.get("/v1/watch?once=true&interval_ms=100").json["models"][0]["engine"]
        return int(engine["blocks"]["max_holders"]) if engine and engine["blocks"] else 0

    browser.click("#siblings")
    eventually(lambda: max_holders() == 8, "eight hold one block")
    with throttled(server.worker_pid):  # so that they still run when the page is checked
        browser.wait("eight hold one block", lambda: "up to 8 hold one" in browser.text("#map-note"))
        assert count(browser, "shared") > 10
        point_at_shared(browser)
        browser.wait("the pointer tells who holds it", lambda: "8 references" in browser.text("#detail"))
        left = "new PointerEvent('pointerleave', { pointerType: 'mouse' })"
        found = browser.text("#detail")
        browser.run(f"document.getElementById('map').dispatchEvent({left})")
        assert re.search(r"Block \d+: shared · 32 tokens · 8 references\. Held by req_\w+ \xd78", found)
        browser.run("document.querySelector('#requests tr').focus()")
        browser.wait("its blocks are marked", lambda: re.match(r"req_\w+ holds \d+ blocks\.", browser.text("#detail")))
        browser.run("document.querySelector('#requests tr').blur()")
    browser.wait("the bill", lambda: "were computed" in browser.text("#log"))
    bill = re.search(
        r"8 \xd7 ([\d,]+) = ([\d,]+) prompt tokens were asked for\.([\d,]+) were computed, ([\d,]+) shared",
        browser.text("#log"),
    )
    assert bill is not None, browser.text("#log")
    one, every, computed, shared = (int(text.replace(",", "")) for text in bill.groups())
    assert 8 * one == every == computed + shared
    assert one <= computed < one + 8 * 8  # the prompt once, and the last token of each sibling


def point_at_shared(browser: Browser) -> None:
    """Move the pointer over a shared block, found by its colour."""
    script = """
    const canvas = document.getElementById("map");
    const colour = getComputedStyle(document.querySelector(".swatch.shared")).backgroundColor;
    const shared = colour.match(/\\d+/g).map(Number);
    const copy = document.createElement("canvas");
    Object.assign(copy, { width: canvas.width, height: canvas.height });
    const paint = copy.getContext("2d", { willReadFrequently: true });
    paint.drawImage(canvas, 0, 0);
    const { data, width } = paint.getImageData(0, 0, canvas.width, canvas.height);
    const box = canvas.getBoundingClientRect();
    for (let at = 0; at < data.length; at += 4) {
      if (shared.every((value, i) => Math.abs(data[at + i] - value) < 4)) {
        const x = (at / 4) % width, y = Math.floor(at / 4 / width), scale = canvas.width / box.width;
        const where = { clientX: box.left + x / scale + 2, clientY: box.top + y / scale + 2, pointerType: "mouse" };
        canvas.dispatchEvent(new PointerEvent("pointermove", where));
        return true;
      }
    }
    return false;
    """
    browser.wait("a shared block is drawn", lambda: browser.run(script))


@needs_browser
def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, tiny_model: Path) -> None:
    with (
        serving(str(tiny_model), *FAKE, "--device", "20ms", "--api-key", KEY, "--api-key", OTHER, key=OTHER) as server,
        ExitStack() as stack,
    ):
        browser.open(server.url)
        browser.wait("it asks", lambda: browser.run("return !document.getElementById('key-form').hidden"))
        assert not is_open(browser)
        assert "tiny" not in browser.text("body")  # nothing is shown before
        browser.type("#key", "sk-wrong-0000001\n")
        browser.wait("a wrong one is refused", lambda: "not known" in browser.text("#key-note"))
        assert not is_open(browser)
        browser.type("#key", KEY + "\n")
        browser.wait("the right one opens", lambda: is_open(browser))
        assert browser.run(
            "return [...document.querySelectorAll('#models button')].every((one) => one.offsetParent === null)"
        )
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
        stack.enter_context(server.send_request(body))
        counted = "1 request more, of other keys"
        browser.wait("another key's request is counted", lambda: counted in browser.text("#requests-note"))
        assert "req_" not in browser.text("#requests")  # without request ids
        browser.open(server.url)
        browser.wait("the tab still has it", lambda: is_open(browser))
        refused = [text for text in browser.complaints() if "401" not in text]  # the browser itself logs a 401
        assert refused == []
        browser.run("sessionStorage.clear()")


@needs_browser
def test_several_models_are_loaded_pinned_and_unloaded(browser: Browser, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "second")
    with serving(str(tiny_model), str(tmp_path / "second"), *FAKE) as server:

        def press(name: str) -> None:
            there = f"return Boolean(document.querySelector('[aria-label=\"{name}\"]')?.offsetParent)"
            browser.wait(name, lambda: browser.run(there))
            browser.click(f"[aria-label='{name}']")

        def badge() -> str:
            return str(browser.run("return document.querySelectorAll('#models .badge')[1].textContent"))

        browser.open(server.url)
        browser.wait("both are there", lambda: browser.text("#tabs") == "tinysecond")
        browser.click("#tabs button:nth-child(2)")
        browser.wait("the second is not loaded", lambda: browser.text("#state") == "unloaded")
        assert count(browser, "free") == 0  # and has no blocks to show
        assert browser.text("#requests-note") == "The model is unloaded."
        press("Load second")
        browser.wait("it is", lambda: badge() == "ready" and browser.text("#state") == "ready")
        browser.wait("with its blocks", lambda: count(browser, "free") == 399)
        assert re.search(r"held of .* for all models", browser.text("#memory"))
        press("Pin second")
        browser.wait("it is pinned", lambda: badge() == "ready, pinned")
        press("Unload second")
        browser.wait("what is pinned stays", lambda: "unpin it first" in browser.text("#models"))
        press("Unpin second")
        browser.wait("it is not pinned", lambda: badge() == "ready")
        press("Unload second")
        browser.wait("it goes", lambda: badge() == "unloaded")
        assert [text for text in browser.complaints() if "400" not in text] == []


SCRIPTED = """
window.asked = [];
const real = window.fetch, answers = arguments[0];
window.fetch = async (path, more) => {
  if (path !== "v1/chat/completions" || !answers.length) return real(path, more);
  asked.push(JSON.parse(more.body).messages);
  const chunks = answers.shift().map(([delta, finish_reason]) => ({ choices: [{ index: 0, delta, finish_reason }] }));
  const frames = [...chunks.map((one) => JSON.stringify(one)), "[DONE]"];
  return new Response(frames.map((one) => `data: ${one}\\n\\n`).join(""));
};
"""


def thoughts_and_calls(browser: Browser) -> None:
    """No test model has reasoning, so a script in the browser makes up the answers."""

    def say(text: str, number: int) -> str:
        browser.type("#text", text + "\n")
        ended = f"return !document.getElementById('send').hidden && asked.length === {number}"
        browser.wait("the answer ends", lambda: browser.run(ended))
        return str(browser.run("return document.querySelector('#log').lastChild.innerText"))

    thought = [{"reasoning_content": "Hm, <b>a"}, None], [{"reasoning_content": " fox."}, None]
    call = [{"tool_calls": [{"index": 0, "function": {"name": "look_up", "arguments": "{}"}}]}, "tool_calls"]
    refusal = [[{"refusal": "I will not."}, "stop"]]
    browser.run(SCRIPTED, [[*thought, [{"content": "A fox."}, "stop"]], [call], [*thought, [{}, "length"]], refusal])
    assert say("Who?", 1).split() == ["Hm,", "<b>a", "fox.", "A", "fox."]
    colour = "return getComputedStyle(document.querySelector(arguments[0])).color"
    assert browser.run(colour, "#log .thoughts") == browser.run(colour, ".note") != browser.run(colour, "#log .words")
    assert "called look_up." in say("Look.", 2)
    assert "Cut off at 512 tokens, the most that this page asks for, before it began to answer." in say("Think.", 3)
    assert "The model refused: I will not." in say("Do.", 4)
    answered = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A fox."}]
    assert browser.run("return asked.at(-1)") == [*answered, {"role": "user", "content": "Do."}]


@needs_browser
def test_it_reconnects_and_shows_names_as_text(browser: Browser, tiny_model: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    with serving(str(tiny_model), *FAKE, "--served-model-name", evil) as first:
        browser.open(first.url)
        browser.wait("it opens", lambda: is_open(browser))
        assert browser.text("#tabs") == evil
        assert browser.run("return document.querySelectorAll('#tabs img, #models img').length") == 0
        thoughts_and_calls(browser)
        port = str(first.address[1])
        first.stop()
        browser.wait("it says that the server is away", lambda: "away" in browser.text("#state"))
        browser.type("#text", "Anyone?\n")
        browser.wait("so does the chat", lambda: "the server does not answer" in browser.text("#log"))
    second: Server = spawn(str(tiny_model), *FAKE, "--port", port, "--served-model-name", "another")
    try:
        wait_ready(second)
        browser.wait("it is back, and shows what is there now", lambda: browser.text("#tabs") == "another")
        browser.wait("it is ready", lambda: browser.text("#state") == "ready")
    finally:
        put_away(second)


@needs_browser
def test_a_hundred_thousand_blocks_are_drawn_in_cells(browser: Browser, tiny_model: Path) -> None:
    with serving(str(tiny_model), "--backend", "fake", "--num-blocks", "100001") as server:
        browser.open(server.url)
        browser.wait("it opens", lambda: is_open(browser))
        browser.wait(
            "the map is whole", lambda: "100,000 blocks of 32 tokens · 50 blocks a cell" in browser.text("#map-note")
        )
        browser.run("dispatchEvent(new Event('resize')); return 1")  # redraws the whole map
        browser.run("document.getElementById('map').focus()")
        for key in ("\ue014", "\ue014"):  # arrow right, twice: the second cell
            browser.type("#map", key)
        browser.wait(
            "a cell tells of its blocks", lambda: browser.text("#detail").startswith("Blocks 51 to 100: 50 free")
        )
        check_layout(browser)
        assert browser.complaints() == []
