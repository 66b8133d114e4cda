"""The process in which chat templates run: whatever a template does, it is an error, and the next one runs."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxllm.text import sandbox as render

GROW = "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"
HOSTILE = {
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}": "runs for more than 10000000",
    "{% set a = 'x' * 100000 %}{% for i in range(1000) %}{{ a }}{% endfor %}": "writes 100000000 characters",
    "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}": "recursion limit",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "recursion limits",
    "{{ 'x' * 10000000000 }}": "too large|a long text counts as many",
    GROW.replace("STEP", "ns.s ~ ns.s"): "needs .* memory",
    GROW.replace("STEP", "ns.s.replace('x', 'xxxxxxxxxx')"): "needs .* memory",
    "{% set a = range(99999)|list %}{% for i in range(99999) %}{% set b = a|tojson %}{% endfor %}": "more than 3 s",
    "a\n{% if %}": r"syntax error.*\(in line 2\)",
    "a\nb {{ c.d.e }}": r"`c` is undefined \(in line 2\)",
    "{{ messages|no_such_filter }}": "no_such_filter is unknown",
    "{{ raise_exception('not ' ~ 1) }}": "^the chat template refuses the conversation: not 1$",
    "{% include '/etc/passwd' %}": "template not found",
    "{% import 'os' as os %}": "template not found",
    "{{ messages.__len__() }}": "undefined|insecure",
    "{{ messages[0].update.__self__.__class__.__mro__ }}": "undefined",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "undefined",
    "{{ raise_exception.__globals__['sys'] }}": "undefined",
    "{{ strftime_now(3) }}": "failed: TypeError",
}


@pytest.fixture(scope="module")
def sandbox():
    return render.TemplateSandbox(timeout_s=3.0)


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_is_an_error_and_the_next_one_runs(template, sandbox):
    with pytest.raises(ValueError, match=HOSTILE[template]):
        sandbox.render(template, {"messages": [{"role": "user", "content": "a"}]})
    assert sandbox.render("{{ a }}", {"a": "é"}) == "é"


def test_a_template_cannot_change_what_the_next_one_sees(sandbox):
    messages = [{"role": "user", "content": "a"}]
    variables = {"messages": messages}
    assert sandbox.render("{{ messages.append(1) }}{{ messages|length }}", variables) == "None2"
    assert sandbox.render("{{ messages|length }}", variables) == "1"
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object(), "\ud800", b"x"])
def test_only_json_reaches_a_template(value, sandbox):
    with pytest.raises(ValueError, match="takes JSON values only"):
        sandbox.render("{{ a }}", {"a": value})


def test_many_threads_get_their_own_answers(sandbox):
    wrong = []

    def work(number):
        for i in range(20):
            text = f"{number}.{i}"
            if sandbox.render("{{ a }}", {"a": text}) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_answer_that_ctrl_c_left_behind_is_nobodys(sandbox, monkeypatch):
    sandbox.render("", {})
    process = sandbox._process

    class Interrupted:
        def readline(self):
            raise KeyboardInterrupt

        def close(self):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(process, "stdout", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            sandbox.render("old", {})
    process.stdout.close()
    assert sandbox.render("new", {}) == "new"
    assert process.returncode is not None


def test_the_process_ends_with_its_owner():
    renderer = render.TemplateSandbox()
    renderer.render("", {})
    process = renderer._process
    del renderer
    assert process.returncode is not None
    program = "from jaxllm.text.sandbox import TemplateSandbox as S\nr = S()\nprint(r.render('a', {}), r._process.pid)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    text, pid = done.stdout.split()
    assert text == "a" and done.stderr == "" and not Path(f"/proc/{pid}").exists()


def test_a_process_that_died_and_one_that_cannot_start(monkeypatch, tmp_path):
    renderer = render.TemplateSandbox()
    assert renderer.render("a", {}) == "a"
    renderer._process.kill()
    renderer._process.wait()
    assert renderer.render("b", {}) == "b", "a process that died while it was idle is no error"
    broken = tmp_path / "worker.py"
    broken.write_text("import no_such_module")
    monkeypatch.setattr(render, "_WORKER", broken)
    with pytest.raises(RuntimeError, match="is minijinja installed"):
        render.TemplateSandbox().render("", {})
