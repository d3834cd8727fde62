import signal
import threading
import time
from pathlib import Path

import pytest
from ends_within import ends_within
from waiting import LIMIT_S, wait_until

from dapo_jax.data import template_sandbox
from dapo_jax.data.chat_template import render

USER = [{"role": "user", "content": "12 + 7 ="}]
FOLDER = Path(__file__).parent / "templates"
SHORT = "{{ messages[0].content }}"


def plain(template, messages=USER):
    return render(template, messages, special_tokens={})


@pytest.mark.parametrize("template", (FOLDER / "too_large.txt").read_text().splitlines())
def test_a_template_cannot_make_what_is_too_large(template):
    refusals = "SecurityError|OverflowError: Range too big|UndefinedError: 'lipsum'|No filter named 'random'"
    message = f"the chat template failed .*({refusals}).* the model's template"
    with ends_within(), pytest.raises(ValueError, match=message):
        plain(template)


@pytest.mark.parametrize("template", (FOLDER / "endless.txt").read_text().splitlines())
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(template_sandbox, "TIME_LIMIT_S", 0.2)
    with ends_within(), pytest.raises(ValueError, match="TimeoutError: still running after 0.2 s|SecurityError"):
        plain(template)
    assert plain(SHORT)


def test_a_timer_that_runs_goes_on_after_a_rendering(monkeypatch):
    fired = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 2 * LIMIT_S)
        plain(SHORT)
        assert LIMIT_S < signal.getitimer(signal.ITIMER_REAL)[0] <= 2 * LIMIT_S and not fired
        monkeypatch.setattr(template_sandbox, "TIME_LIMIT_S", 0.2)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(ValueError, match="still running"):
            plain("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
        wait_until(lambda: fired)
        assert len(fired) == 1
        assert plain(SHORT) and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_other_threads_render_too_with_the_limits_of_size():
    results = []

    def work():
        results.append(plain(SHORT))
        with pytest.raises(ValueError, match="SecurityError"):
            plain("{{ 'a' * 10**10 }}")
        results.append("refused")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [plain(SHORT), "refused"]


def test_what_is_large_but_allowed_renders():
    content = "a b\n" * 1_000_000
    assert plain("{{ messages[0].content ~ '!' }}", [{"role": "user", "content": content}]) == content + "!"
    replaced = plain("{{ messages[0].content.replace('\n', '; ') }}", [{"role": "user", "content": content}])
    assert replaced == content.replace("\n", "; ")
    assert plain("{{ '**%s**-%03d' % ('x', 7) }} {{ '{{*{:>5}*}}'.format('y') }}") == "**x**-007 {*    y*}"
    assert plain("{{ ['a', 1] | join(', ') }} {{ '-'.join(['b', 'c']) }} {{ 'de' | join('+') }}") == "a, 1 b-c d+e"
    assert plain("{{ 'ab' * 3 + 'c' }} {{ 2**10 }} {{ 7 % 4 }} {{ 1 ~ 'x' ~ none }} {{ 1.25 | round(1) }}") == (
        "abababc 1024 3 1xNone 1.2"
    )
