"""The rendering process: features of transformers, and containment of hostile templates and of dead children."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quire.errors import RequestFailed, TemplateError, TemplateRefusal
from quire.text import child_process as child_module
from quire.text.chat_template import RENDER_LIMIT_S, Renderer
from quire.text.child_process import Child, Died, Interrupted, NoAnswer
from tests.waiting import HANG_S, eventually, is_running

GOOD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}

HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "a giant constant": "{{ 'a' * 1000000000 }}",
    "a giant product": "{{ messages[0].content * 1000000000 }}",
    "a giant filter": "{{ 'a' | center(1000000000) }}",
    "a giant format": "{{ '%1000000000d' % 1 }}",
    "doubling": "{% set ns = namespace(s='aaaa') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a giant power": "{{ 9 ** 99999999 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a giant range": "{% for i in range(10**12) %}{% endfor %}",
    "a giant list": "{{ (range(99999) | list) * 100000 }}",
    "too much text": "{% for i in range(9999) %}{% for j in range(9999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "an escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "a shell": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "an import": "{% import 'os' as os %}",
    "an include": "{% include '/etc/passwd' %}",
    "changing the messages": "{{ messages.append(1) }}",
    "bad syntax": "{% for %}",
    "no such thing": "{{ nothing.at.all }}",
    "half a character": "{{ '\\ud800' }}",
}


@pytest.fixture
def good() -> Iterator[Renderer]:
    renderer = Renderer(GOOD)
    yield renderer
    renderer.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_an_error(name: str) -> None:
    with closing(Renderer(HOSTILE[name])) as renderer, pytest.raises(TemplateError) as caught:
        renderer.render(HELLO)
    assert "did not finish within 60 s" not in str(caught.value)  # ended by its own limits, not by the timeout


def test_the_renderer_works_after_a_hostile_render() -> None:
    source = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    source += "{% endfor %}{% elif messages[0].content == 'fill' %}{{ 'a' * 999999999 }}{% else %}fine{% endif %}"
    with closing(Renderer(source)) as renderer:
        for content, message in (("loop", "did not finish within 1 s of CPU time"), ("fill", "memory")):
            with pytest.raises(TemplateError, match=message):
                renderer.render({"messages": [{"role": "user", "content": content}]})
            assert renderer.render(HELLO) == "fine"


def test_a_render_is_not_refused_because_the_machine_is_busy(good: Renderer) -> None:
    """The process is stopped at first, for longer than its CPU time limit."""
    good.warm_up()
    pid = process_of(good).pid
    os.kill(pid, signal.SIGSTOP)
    waking = threading.Timer(RENDER_LIMIT_S + 0.5, os.kill, (pid, signal.SIGCONT))
    waking.start()
    assert good.render(HELLO) == "<user>hi"
    waking.join()
    assert process_of(good).pid == pid


def process_of(renderer: Renderer) -> subprocess.Popen[bytes]:
    process = renderer._process
    assert process is not None
    return process


def test_a_killed_child_is_replaced(good: Renderer) -> None:
    assert good.render(HELLO) == "<user>hi"
    process = process_of(good)
    process.kill()
    process.wait()
    assert good.render(HELLO) == "<user>hi"


def test_a_child_that_is_stopped_is_replaced(good: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.text.child_process.IDLE_LIMIT_S", 0.5)
    good.warm_up()
    process = process_of(good)
    os.kill(process.pid, signal.SIGSTOP)
    assert good.render(HELLO) == "<user>hi"
    assert process.returncode == -signal.SIGKILL
    assert process_of(good).pid != process.pid


@pytest.mark.parametrize("num_kills", [1, 2])
def test_a_render_whose_child_is_killed_is_tried_once_more(
    good: Renderer, monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    good.warm_up()
    killed: list[int] = []
    write = os.write

    def kill_first(fd: int, data: bytes) -> int:
        if b"variables" in bytes(data) and len(killed) < num_kills:
            killed.append(process_of(good).pid)
            process_of(good).kill()
        return write(fd, data)

    monkeypatch.setattr("quire.text.child_process.os.write", kill_first)
    if num_kills == 1:
        assert good.render(HELLO) == "<user>hi"
    else:
        with pytest.raises(RequestFailed, match="was killed"):
            good.render(HELLO)
        assert good.render(HELLO) == "<user>hi"
    assert len(set(killed)) == num_kills


def test_a_failed_render_keeps_the_process() -> None:
    renderer = Renderer("{{ messages[0].content.nothing.at_all if messages[0].content == 'bad' else 'fine' }}")
    renderer.warm_up()
    process = process_of(renderer)
    with pytest.raises(TemplateError, match="failed: UndefinedError"):
        renderer.render({"messages": [{"role": "user", "content": "bad"}]})
    assert renderer.render(HELLO) == "fine"
    assert process_of(renderer) is process


def test_an_interrupted_render_leaves_no_answer_for_the_next(good: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    good.warm_up()
    with monkeypatch.context() as patch:
        patch.setattr("quire.text.child_process._parsed", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            good.render({"messages": [{"role": "user", "content": "another's secret"}]})
    assert good.render(HELLO) == "<user>hi"


def test_the_child_dies_with_its_parent() -> None:
    code = (
        "import os; from quire.text.chat_template import Renderer; r = Renderer('x'); r.warm_up();"
        "print(r._process.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    eventually(lambda: not is_running(int(done.stdout)), "the template's process ends with its parent")


def test_a_garbage_collected_renderer_leaves_no_process() -> None:
    renderer = Renderer(GOOD)
    renderer.warm_up()
    process = process_of(renderer)
    del renderer
    gc.collect()
    assert process.returncode is not None


def test_a_closed_renderer_raises(good: Renderer) -> None:
    good.warm_up()
    good.close()
    good.close()
    with pytest.raises(TemplateError, match="closed"):
        good.render(HELLO)


def test_renders_of_several_threads_are_serialized(good: Renderer) -> None:
    texts: list[str] = []

    def work(number: int) -> None:
        conversation = {"messages": [{"role": "user", "content": str(number)}]}
        texts.extend(good.render(conversation) for _ in range(10))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted(f"<user>{number}" for number in range(8) for _ in range(10))


def test_too_long_an_answer_is_refused(good: Renderer) -> None:
    with pytest.raises(TemplateError, match="longer than 4194304 characters"):
        good.render({"messages": [{"role": "user", "content": "x" * 4_200_000}]})
    assert good.render(HELLO) == "<user>hi"


def test_a_template_refusal_has_the_templates_message() -> None:
    renderer = Renderer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefusal, match=r"^roles must alternate$"):
        renderer.render(HELLO)


def test_variables_are_those_the_template_uses(good: Renderer) -> None:
    assert good.variables == {"messages"}


def test_no_secrets_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    renderer = Renderer(GOOD)
    renderer.warm_up()
    if os.path.exists("/proc/self/environ"):
        with open(f"/proc/{process_of(renderer).pid}/environ", "rb") as file:
            assert b"hf_secret" not in file.read()


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('smuggled')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    renderer = Renderer(GOOD)
    assert renderer.render(HELLO) == "<user>hi"


FEATURES = {
    "{{ {'a': 'é<&>', 'b': [1, 2]} | tojson }}": '{"a": "é<&>", "b": [1, 2]}',
    "{{ [1] | tojson(indent=2) }}": "[\n  1\n]",
    "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}": "13",
    "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "1",
    "a\n  {% if true %}\nb\n  {% endif %}\nc": "a\nb\nc",
    "{% generation %}said{% endgeneration %}!": "said!",
    "{{ strftime_now('%Y') | length }}": "4",
    "{% set ns = namespace(x=1) %}{% for i in [1] %}{% set ns.x = 5 %}{% endfor %}{{ ns.x }}": "5",
    "{{ messages[0]['content'] | trim | upper }}{{ missing is defined }}": "HIFalse",
    "{{ dict(a=1).a }}{{ 'x,y'.split(',')[1] }}": "1y",
}


@pytest.mark.parametrize("source", FEATURES)
def test_template_features(source: str) -> None:
    renderer = Renderer(source)
    assert renderer.render(HELLO) == FEATURES[source]


SCRIPT = """
import json, sys, time
for line in sys.stdin:
    order = json.loads(line)
    if "sleep" in order:
        time.sleep(60)
    if "end" in order:
        sys.exit(order["end"])
    print(order.get("say", line.strip()), end=order.get("then", "\\n"), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    child = Child(script)
    yield child
    child.kill()


@pytest.mark.parametrize(
    ("order", "kind", "message"),
    [
        ({"sleep": 1}, NoAnswer, r"did not finish within 0\.3 s"),
        ({"end": 3}, Died, "ended its process"),
        ({"say": "[1]"}, NoAnswer, "wrote an invalid answer"),
        ({"say": "{"}, NoAnswer, "wrote an invalid answer"),
        ({"say": "[" * 5000}, NoAnswer, "wrote an invalid answer"),
        ({"say": "x" * 3000, "then": ""}, NoAnswer, "wrote 3000 bytes and did not finish"),
    ],
)
def test_a_failed_child_reports_why_and_is_replaced(
    child: Child, order: dict[str, object], kind: type[NoAnswer], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert child.start()
    assert child.ask({"a": "ł" * 200_000}, HANG_S) == {"a": "ł" * 200_000}  # more than the buffer of a pipe
    assert not child.start()
    monkeypatch.setattr(child_module, "MAX_ANSWER_BYTES", 2000 if "then" in order else 1 << 20)
    with pytest.raises(kind, match=message) as caught:
        child.ask(order, 0.3 if "sleep" in order else HANG_S)
    assert getattr(caught.value, "returncode", 3) == 3
    assert child.start()
    assert child.ask({"b": 1}, HANG_S) == {"b": 1}
    child.kill()
    child.kill()


def test_a_child_that_does_nothing_is_given_up(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python can wait for ever for a thread that could not be started for lack of memory."""
    monkeypatch.setattr(child_module, "IDLE_LIMIT_S", 0.5)
    child.start()
    with pytest.raises(Interrupted, match=r"did nothing for 0\.5 s"):
        child.ask({"sleep": 1}, HANG_S)
    assert child.start()
    assert child.ask({"b": 1}, HANG_S) == {"b": 1}


def test_a_child_that_cannot_start_raises(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    for python in ("", "/nowhere/python"):
        monkeypatch.setattr("sys.executable", python)
        with pytest.raises(NoAnswer, match="does not start: "):
            child.start()
