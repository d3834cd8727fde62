import subprocess
import threading
from pathlib import Path

import pytest
from ends_within import ends_within

from dapo_jax.data import chat_template
from dapo_jax.data.chat_template import Conversation, render
from dapo_jax.errors import InputError

USER = [{"role": "user", "content": "12 + 7 ="}]
FOLDER = Path(__file__).parent / "templates"
SHORT = "{{ messages[0].content }}"
TOO_LARGE, ENDLESS = ((FOLDER / f"{name}.txt").read_text().splitlines() for name in ("too_large", "endless"))


def chat(content, **arguments):
    return Conversation([{"role": "user", "content": content}], {"bos_token": "<s>"}, arguments)


@pytest.fixture
def processes(monkeypatch):
    """The environments of the processes that were started."""
    environments, run = [], subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda *given, **options: environments.append(options["env"]) or run(*given, **options)
    )
    return environments


def refused(template, monkeypatch, reasons, *, time_limit_s):
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", time_limit_s)
    monkeypatch.setattr(chat_template, "MEMORY_LIMIT_MB", 256)
    message = f"the chat template failed .*({reasons}).* the model's template"
    with ends_within(), pytest.raises(InputError, match=message):
        render(template, [chat("")])


@pytest.mark.parametrize(
    "template, reason, time_limit_s",
    [
        ("{{ 'a' * 10**10 }}", "MemoryError: it needs more than 256 MiB", 10),
        ("{{ 'a' * 10**7 ~ 'a' }}", "OverflowError: a text of more than 10000000 characters", 10),
        ("{{ ([[1] * 40] * 99999) | sum(start=[]) }}", "TimeoutError: still running after 0.2 s", 0.2),
    ],
)
def test_a_template_that_makes_too_much_or_does_not_end_is_stopped(template, reason, time_limit_s, monkeypatch):
    refused(template, monkeypatch, reason, time_limit_s=time_limit_s)


@pytest.mark.slow
def test_other_templates_that_make_too_much_or_do_not_end_are_stopped(monkeypatch):
    reasons = "MemoryError|OverflowError|TimeoutError|UndefinedError: 'lipsum'|No filter named 'random'"
    for template in TOO_LARGE + ENDLESS:
        refused(template, monkeypatch, reasons, time_limit_s=0.4)


def test_many_conversations_take_one_process_which_gets_no_secret_and_gives_the_same_texts(processes, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    template = "{{ bos_token }}{{ messages[0].content }}{{ tools | tojson }}{{ x is none }}"
    chats = [chat(f'é🙂\n"{number}\\', tools=[{"a": 1.5}], x=None if number % 2 else number) for number in range(50)]
    assert render(template, chats) == render(template, chats, isolated=False) and len(processes) == 1
    assert "secret" not in processes[0].values()
    monkeypatch.setattr(chat_template, "AT_ONCE", 20)
    assert render(template, chats) == render(template, chats, isolated=False) and len(processes) == 4
    assert render(template, []) == [] and len(processes) == 4


def test_the_conversation_that_fails_is_named_and_any_thread_may_render():
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('Never.') }}{% endif %}" + SHORT
    chats = [chat("a"), Conversation([{"role": "system", "content": "no"}], {}), chat("b")]
    for isolated in True, False:
        with pytest.raises(InputError, match=r"roles \['system'\]: TemplateError: Never.. If the model has no system"):
            render(template, chats, isolated=isolated)
    with pytest.raises(InputError, match="must be plain JSON"):
        render(template, [chat(object())])
    texts = []
    thread = threading.Thread(target=lambda: texts.extend(render(template, chats[::2])))
    thread.start()
    thread.join()
    assert texts == ["a", "b"]


def test_arguments_that_the_template_never_reads_are_warned_of_once(caplog):
    template = SHORT + "{% if thinking is defined %}!{% endif %}{% set mine = 1 %}{# once #}"
    for isolated in (True, False, False):
        assert render(template, [chat("a", thinking=1), chat("b", thinkin=1, mine=2)], isolated=isolated) == ["a!", "b"]
    assert ["never reads mine, thinkin, given by" in text for text in caplog.messages] == [True]
