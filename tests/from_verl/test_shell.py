"""bash expands scripts without starting, writing or reading anything."""

import os
import signal
import socket
import subprocess

import pytest

from dapo_jax.errors import InputError
from dapo_jax.tools.from_verl import shell
from dapo_jax.tools.from_verl.shell import UNKNOWN, Script

ENVIRONMENT = {"HOME": "/home/me", "SET": "one two", "EMPTY": ""}
LINES = [
    "show plain 'single $SET' \"double $SET\" $SET \"a\"b'c' \\$SET",
    'A=${SET:-x}; B=${UNSET:-"${HOME}/d e"}; C=${EMPTY:-c}; D=${EMPTY-d}; show "$A" $B "$C" "$D" end',
    'N=3; M=$((N * (2 + 4) - 1)); show $M $((M / 2)) $((M % 4)) "$(( N*N ))" $((-N))',
    'L=(a "b c" # it\'s a comment\n \'d $SET\' $SET)\nL+=(z)\nshow "${L[@]}" ${#L[@]} "x${L[@]}y" end ${L[1]} $L',
    'E=(); show "${E[@]}" end "$@" "${@}" $1 "$2"',
    "show a \\\n  b # c\nshow d;show e",
    'if [ "$SET" = x ]; then show 1; elif [[ $SET == one* ]]; then show 2; if [ -n "${UNSET:-}" ]; then show 3; fi; '
    "else show 4; fi; show 5",
    'if [ -z "$EMPTY" ]\nthen\n  A=1\nelse\n  A=2\nfi\nif ! [ $A -gt 1 ]; then B=3; fi; show $A $B "$#"',
    'case "$SET" in\n  two) show 1 ;;\n  one | one*)\n    show 2\n    case a in b) show 3 ;; *) show 4;; esac ;;\n'
    "  *) show 5 ;;\nesac\nshow 6",
    'case x in (x) show 1;; esac; [ -n "$SET" ] && A=1; [ -z "$SET" ] && A=2; [ -z "$SET" ] || B=3; show $A $B',
    'if [ -n "$SET" ]; then\n  L=(a b)\n  case c in\n    c) L+=(d) ;;\n  esac\nfi\nshow "${L[@]}"',
    'show "${UNSET:-"a b"}c" "d${UNSET:-e f}"',
    "X=1 show \"k=['a','b']\" 'l=[\"a\",\"b\"]' ~/x",
    'S="$SET"; S+=" three"; show $S "$S" ${UNSET:+no}${SET:+yes} "${NEW:=fresh}" $NEW',
    "show one 2>/dev/null two | cat",
    'f() { local x=$1; show "${x%.*}" "${x##*/}" "${SET/one/1}"; }\nfor i in 1 2; do f /a/$i.b; done; show ${SET^^}',
    'declare -A M=([a]=1 [b]=2); show "${M[b]}"; while ((${N:=0} < 2)); do N=$((N + 1)); show $N; done',
    "cat <<'END' > file\nit's (not code\nEND\nshow one &\nset -euo pipefail; show two > log 2>&1 | tee -a log",
    'show "back\\\\slash \\"quoted\\" \\$x" a=b',
]


RECORDED = "commands that are recorded and not run: "


@pytest.mark.parametrize("text", LINES)
def test_words_are_those_of_bash(text, tmp_path):
    show = """show() { printf '<%s>' "$@"; printf '\\n'; }; tee() { :; }\n"""
    done = subprocess.run(
        ["bash", "-c", f"{show}{text}\nwait; cat log 2>/dev/null || :", "script", "p q", "r"],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT | {"PATH": os.environ["PATH"]},
        cwd=tmp_path,
    )
    script = Script(text, environment=ENVIRONMENT, arguments=["p q", "r"])
    shown = ["".join(f"<{word}>" for word in words[1:]) for words in script.commands if words[0] == "show"]
    assert "\n".join(shown) == done.stdout.rstrip("\n")
    assert [line for line in script.skipped if not line.startswith(RECORDED)] == []


@pytest.mark.parametrize(
    "text",
    [
        "/usr/bin/touch PLACE",
        "touch PLACE",
        "command -p touch PLACE",
        "exec /usr/bin/touch PLACE",
        "builtin exec /usr/bin/touch PLACE",
        "hash -p /usr/bin/touch touch; touch PLACE",
        "PATH=/usr/bin:/bin; touch PLACE",
        "export PATH=/usr/bin:/bin; touch PLACE",
        "eval $'P\\x41TH=/usr/bin:/bin'; touch PLACE",
        "set +r; shopt -u restricted_shell; eval 'set +r'; /usr/bin/touch PLACE",
        "python3() { /usr/bin/touch PLACE; echo a > PLACE; }; python3",
        "BASH_ENV=SCRIPT; export BASH_ENV; bash -c true",
        "echo a > PLACE",
        "echo a >> PLACE; echo a >| PLACE; echo a &> PLACE; : <> PLACE",
        "eval $'echo a \\x3e PLACE'",
        "eval $'exec 0\\x3c&- 2\\x3e&-'; eval $'echo a \\x3e PLACE'",
        "source SCRIPT",
        ". SCRIPT; builtin . SCRIPT; builtin source SCRIPT",
        "A=$(/usr/bin/touch PLACE); B=`/usr/bin/touch PLACE`",
        "eval 'A=$(/usr/bin/touch PLACE)'; eval 'A=`/usr/bin/touch PLACE`'; x='a[$(/usr/bin/touch PLACE)]'; : $((x))",
        "enable -f SCRIPT touch; touch PLACE",
        "trap '/usr/bin/touch PLACE; echo > PLACE' EXIT",
        "coproc /usr/bin/touch PLACE; /usr/bin/touch PLACE &",
        "unset -f command_not_found_handle; command_not_found_handle() { /usr/bin/touch PLACE; }; nothing",
        "ulimit -n 99; enable ulimit; builtin ulimit -n 99; mapfile -C '/usr/bin/touch PLACE' -c 1 < SCRIPT",
    ],
)
def test_a_script_cannot_start_a_program_or_write_a_file(tmp_path, text):
    place, script = tmp_path / "made", tmp_path / "script"
    script.write_text(f"/usr/bin/touch {place}; echo a > {place}\n")
    script.chmod(0o700)
    Script(text.replace("PLACE", str(place)).replace("SCRIPT", str(script)), environment={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script"] and script.read_text().startswith("/usr")


def test_a_script_sees_no_file_variable_or_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hush")
    file = tmp_path / "secret"
    file.write_text("hush\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
        text = f"""
show "$SECRET" "$(env)"
read x < {file}; eval $'read y \\x3c{file}'; mapfile z < {file}; show "$x" "$y" "$z" {tmp_path}/*
eval $'exec 0\\x3c&-'; eval $'read x \\x3c{file}'; eval $'exec 2\\x3e&-'; eval $'read y \\x3c{file}'; show "$x$y"
eval $'exec 3\\x3c{address}'; eval $'exec 3\\x3c\\x3e{address}'; eval $'show end \\x3e{address}'
show end
"""
        script = Script(text, environment={})
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    shown = [words for words in script.commands if words[0] == "show"]
    assert shown[-1] == ["show", "end"] and "hush" not in str(shown)
    assert shown[0][:3] == ["show", "", UNKNOWN]


@pytest.mark.parametrize(
    "text", ["while :; do :; done", "while :; do exit 0; done", "eval 'set -m; (while :; do :; done) & wait'"]
)
def test_an_endless_script_is_ended_with_what_it_started(monkeypatch, text):
    monkeypatch.setattr(shell, "SECONDS", 0.5)
    started, end = [], shell._end

    def noted(process):
        started.append(process.pid)
        end(process)

    monkeypatch.setattr(shell, "_end", noted)
    script = Script(f"show before\n{text}\nshow after", environment={})
    assert script.commands[0] == ["show", "before"] and ["show", "after"] not in script.commands
    assert "the script did not end in 0.5 s: what follows is not read" in script.skipped
    assert list(shell._of_session(started[0])) == []


@pytest.mark.parametrize("text", ["A=aaaa; while :; do A=$A$A; done", "while :; do echo $PATH$PATH$PATH$PATH; done"])
def test_a_script_that_exceeds_a_limit_is_known_to_be_cut(text):
    script = Script(f"show before\n{text}\nshow after", environment={})
    assert script.commands[0] == ["show", "before"] and ["show", "after"] not in script.commands
    assert "the script exceeds a limit of memory or output: what follows is not read" in script.skipped


def test_a_script_cannot_kill_a_process():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    Script("kill -USR1 $PPID; builtin kill -USR1 $PPID; enable kill; kill -USR1 $PPID", environment={})
    signal.signal(signal.SIGUSR1, before)
    assert heard == []


def test_the_shell_is_a_restricted_one():
    assert "restricted" in Script("/usr/bin/touch x", environment={}).skipped[0]


def test_what_the_script_needs_and_cannot_have_is_listed():
    text = """A=1
if [ -f "$B" ]; then
    A=2
fi
source env.sh
if [ "$(hostname)" = a ]; then A=7; fi
N=$(($(nproc) / 2)) M=$(pwd)/x
E=${F:-"$(cd "$(dirname "$0")" && pwd)"}
G=$((1 / 0))
exit 1
read -r D < /etc/hostname
read -r D <<< "$A"
show $A ${A%x} $C "$N" "$M" "$E" a_$(date +%F) "$D"
"""
    script = Script(text, environment={"B": "b", "PWD": "/here"})
    assert script.commands[-1] == ["show", "1", "1", UNKNOWN, "/here/x", UNKNOWN, f"a_{UNKNOWN}", ""]
    assert script.skipped == [
        'line 2: if [ -f "$B" ]; then: of files, only absolute paths are looked for',
        "line 6: $(hostname) is not run",
        "line 7: $(nproc) is not run",
        'line 8: $(cd "$(dirname "$0")" && pwd) is not run: give it by --env F=VALUE',
        "line 11: < /etc/hostname is not read",
        'line 12: <<< "$A" is not read',
        "line 13: $(date +%F) is not run",
        "line 5: source env.sh",
        "line 10: exit 1",
        "variables that are not set and read as empty (give them by --env NAME=VALUE): C",
        'line 9: 1 / 0: division by 0 (error token is "0")',
        "commands that are recorded and not run: show",
    ]


def test_without_a_bash_there_is_a_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="bash is not installed.*: install it, or"):
        Script("show", environment={})
    for code, message in (
        (98, "cannot be kept from opening files here: translate"),
        (99, "older than version 4: install"),
    ):
        (tmp_path / "bash").write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / "bash").chmod(0o700)
        with pytest.raises(InputError, match=message):
            Script("show", environment={})


@pytest.mark.parametrize("text", ["a='b", 'a="b', "a=$((1 + 2", "a=${b", "a=(b", "a=`b"])
def test_what_is_not_closed_is_refused_with_its_line(text):
    with pytest.raises(InputError, match="line [23]: .* is not closed"):
        Script(f"x=1\n{text}", environment={})


ODD = ["", "#", "\\", "a=", "$", "$(", "${}", "$(())", "((", "a() {", "&&", "x=$((1/0))", "if", "fi", "case x in"]


@pytest.mark.parametrize("text", [*ODD, "\0", "é", "'" * 3, *(part * 4000 for part in ("((", "$(", '"$(', "[[ ", "x"))])
def test_any_text_is_read_or_refused(text):
    try:
        Script(text, environment={})
    except InputError as error:
        assert "correct the script" in str(error)


def test_a_script_that_is_too_long_for_bash_is_refused():
    with pytest.raises(InputError, match="longer than 120 KiB"):
        Script("x" * 200_000, environment={})
