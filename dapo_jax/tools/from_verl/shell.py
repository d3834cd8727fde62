"""Host: the commands of a shell script with their values, from a bash that cannot start, write, read or reach anything.

`bash --restricted` with an empty PATH runs no program, redirects no output and sources no file. A limit of no further
open files leaves it no file to read, no pipe and no connection, and the builtins that could harm are disabled. A
function records commands that are not found. `_prepared` takes out of the script what would need more.
"""

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dapo_jax.errors import InputError

UNKNOWN = "\x1a"  # in a word: a part whose value only a program could compute
SECONDS = 10
MAX_BYTES = 120 << 10  # of one argument of a program, on Linux
BY_HAND = "translate the options by the tables of docs/coming_from_verl.md"
_CALL = "\x1acall"  # in the output: begins a record of line, number of words and words, NUL after each
_START = """
((BASH_VERSINFO[0] >= 4)) || exit 99; ulimit -n 0 || exit 98; ulimit -c 0; ulimit -t 10; ulimit -f 8192;
ulimit -v 1000000; enable -n ulimit kill suspend bind complete history fc;
command_not_found_handle() { builtin printf '%s\\0' '' CALL $(((BASH_LINENO > 1 ? BASH_LINENO : BASH_LINENO[1]) - 1))
"$#" "$@"; }; exec() { "$@"; }; exit() { command_not_found_handle exit "$@"; };
source() { command_not_found_handle source "$@"; }; .() { source "$@"; };
cd() { :; }; pushd() { :; }; popd() { :; }; pwd() { builtin echo "$PWD"; };
readonly -f command_not_found_handle;
""".replace("\n", " ").replace("CALL", _CALL)

_DOUBLE, _INSIDE = r'"(?:\\.|[^"\\])*+"', r"[^()]*+"
for _ in range(3):  # quotes and brackets in each other
    _INSIDE = rf"(?:[^()'\"\\]|\\.|'[^']*'|{_DOUBLE}|\({_INSIDE}\))*+"
    _DOUBLE = rf'"(?:\\.|\$\({_INSIDE}\)|[^"\\])*+"'
_SUBSTITUTION = rf"\$\((?!\(){_INSIDE}\)|`(?:\\.|[^`\\])*+`"
_DOCUMENT = r"<<-?[ \t]*(['\"]?)(?P<end>\w+)['\"]?(?P<after>[^\n]*)\n(?:.*?\n)??[ \t]*(?P=end)(?![^\n])"
_WORD = rf"(?:\\.|'[^']*'|{_DOUBLE}|[^\s;&|()<>'\"\\])+"
_REDIRECTION = rf"(?:(?<!\S)\d+|&)?(?:>[>|]?|<<<|<>?(?![<(]))(?:&[\d-]|&?[ \t]*(?:>\([^()]*\)|{_WORD}))"
_PARTS = re.compile(
    rf"""(?P<substitution>{_SUBSTITUTION})
    |(?P<quoted>{_DOUBLE}|\$?\(\((?:[^()]|\([^()]*\))*\)\)|\[\[\s.*?\s\]\])
    |(?P<kept>\\.|\$'(?:\\.|[^'\\])*+'|'[^']*'|(?<![^\s;(|&])\#[^\n]*)
    |(?P<document>{_DOCUMENT})
    |(?P<output>{_REDIRECTION}|\|&?[ \t]*(?:tee|grep|sed|awk|cat)\b(?:[ \t]*(?:{_REDIRECTION}|{_WORD}))*)
    |(?P<background>(?<![&|>;])&(?![&>]))
    |(?P<setting>(?<![^\n])[ \t]*set[ \t]+[-+][a-zA-Z][^\n;&\#]*)
    |(?P<fixed>(?<![\w${{])(?:PATH|SHELL|ENV|BASH_ENV|HISTFILE)(?=\+?=))""",
    re.DOTALL | re.VERBOSE,
)
_READ = re.compile(r"(?<!\\)\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_SET = re.compile(
    r"\b([A-Za-z_]\w*+)(?:\[[^]\n]*\])? ?[+:]?=|\b(?:for|select|read(?: -\w+)*|-v|declare -\w+|local) (\w+)"
)
_OF_BASH = set(
    "BASH EUID FUNCNAME HOSTNAME HOSTTYPE IFS LINENO MACHTYPE OLDPWD OSTYPE PPID PWD RANDOM SECONDS UID".split()
)
_EXPECTED = {"python", "python3", "ray", "torchrun", "source", "exit"}  # the trainer's, and what is listed by line
_FILE_TEST = re.compile(r"(?:\[\[?|\btest)\s+(?:!\s+)?-[abcdefghkLprsSuwx]\s")


class Script:
    """A script as bash runs it.

    Attributes:
        commands: the expanded words of each command that is not a builtin of bash, in the order of the calls.
        skipped: one line per part that bash could not evaluate.
    """

    def __init__(self, text: str, *, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        """InputError if bash cannot read the script, or is not installed."""
        self.skipped: list[str] = []
        unset = sorted(_names(_READ, text) - _names(_SET, text) - environment.keys() - _OF_BASH)
        values = {"PWD": ".", **dict.fromkeys(unset, ""), **environment}
        given = "".join(f"export {name}={shlex.quote(value)}; " for name, value in values.items())
        output, errors, end = _run(f"{_START}{given}\n{self._prepared(text)}".replace("\0", ""), arguments)
        self.commands = [self._called(line, words) for line, words in _calls(output)]
        if unset:
            names = ", ".join(unset)
            self.skipped.append(
                f"variables that are not set and read as empty (give them by --env NAME=VALUE): {names}"
            )
        self._take_errors(errors)
        if end:
            self.skipped.append(f"the script {end}: what follows is not read")
        named = {words[0] for words in self.commands if words and "/" not in words[0] and UNKNOWN not in words[0]}
        if other := ", ".join(sorted(named - _EXPECTED)):
            self.skipped.append(f"commands that are recorded and not run: {other}")

    def _prepared(self, text: str) -> str:
        """The script with as many lines, and with UNKNOWN for substitutions, as they need programs.

        Redirections, `| tee`, `set -e` and the `&` of background commands are left out.
        """

        def skip(match: re.Match[str], why: str, start: int = 0) -> None:
            line = text.count("\n", 0, start + match.start()) + 1
            self.skipped.append(f"line {line}: {match[0].strip().splitlines()[0]} is not {why}")

        def unknown(match: re.Match[str], start: int = 0) -> str:
            if match[0].strip("$()` ") == "pwd":
                return "$PWD"
            named = re.search(r"\$\{(\w+):?-\"?\Z", text[: start + match.start()])  # its default
            skip(match, f"run: give it by --env {named[1]}=VALUE" if named else "run", start)
            return UNKNOWN + "\\\n" * match[0].count("\n")

        def replaced(match: re.Match[str]) -> str:
            match match.lastgroup:
                case "substitution":
                    return unknown(match)
                case "quoted":
                    inner = functools.partial(unknown, start=match.start())
                    found = re.sub(_SUBSTITUTION, inner, match[0], flags=re.DOTALL)
                    return UNKNOWN if found.startswith("$((") and UNKNOWN in found else found
                case "document":
                    return re.sub(_REDIRECTION, " ", match["after"]) + "\n" * match[0].count("\n")
                case "output":
                    if match[0].lstrip("0123456789").startswith("<"):
                        skip(match, "read")
                    return " " + "\\\n" * match[0].count("\n")
                case "background":
                    return "" if re.match(r"[ \t]*\n", text[match.end() :]) else "\n"
                case "setting":
                    return ":"
                case "fixed":
                    return f"_{match[0]}"
            return match[0]

        for line, code in enumerate(text.splitlines(), 1):
            if _FILE_TEST.search(code.partition("#")[0]):
                self.skipped.append(f"line {line}: {code.strip()}: of files, only absolute paths are looked for")
        return _PARTS.sub(replaced, text)

    def _called(self, line: str, words: list[str]) -> list[str]:
        if words[:1] in (["source"], ["exit"]):
            self.skipped.append(f"line {line}: {' '.join(words)}")
        return words

    def _take_errors(self, errors: str) -> None:
        for line, error in re.findall(r"^script: (?:[\w-]+: )?line (\d+): (.*)$", errors, re.MULTILINE):
            if int(line) == 1:
                continue
            where = f"line {int(line) - 1}"
            if unclosed := re.search(r"looking for matching `(.)'", error):
                error = f"the {dict(zip(')}', '({', strict=True)).get(unclosed[1], unclosed[1])} is not closed"
            elif "syntax error: unexpected end of file" in error:
                error = "a bracket or a block is not closed"
            elif "syntax error" not in error or "in expression" in error:
                closed = "Too many open files" in error or "restricted" in error
                self.skipped.append(f"{where}: {error}{' (no program, file or pipe is open to it)' if closed else ''}")
                continue
            if not self.commands:
                raise InputError(f"{where}: {error}: correct the script")
            self.skipped.append(f"{where}: {error}: what follows is not read")


def _names(pattern: re.Pattern[str], text: str) -> set[str]:
    return {name for match in pattern.findall(text) for name in match if name}


def _run(script: str, arguments: Sequence[str]) -> tuple[str, str, str]:
    """What bash prints and says of errors, and why it was ended; "" if it ended by itself."""
    bash = shutil.which("bash")
    if bash is None:
        raise InputError(f"bash is not installed, and it expands the script: install it, or {BY_HAND}")
    if len(script.encode()) > MAX_BYTES:
        raise InputError(f"the script is longer than {MAX_BYTES >> 10} KiB: give its part that starts the trainer")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        process = subprocess.Popen(
            [bash, "--restricted", "-c", script, "script", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={"PATH": "/dev/null"},
            start_new_session=True,
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        if code == 98:
            raise InputError(f"{bash} cannot be kept from opening files here: {BY_HAND}")
        if code == 99:
            raise InputError(f"{bash} is older than version 4: install a newer bash, and put it first on PATH")
        found = []
        for file in (output, errors):
            file.seek(0)
            found.append(file.read().decode("utf-8", "replace"))
    exceeds = code is not None and (code < 0 or "cannot allocate" in found[1])
    late = f"did not end in {SECONDS} s" if code is None else ""
    return found[0], found[1], "exceeds a limit of memory or output" if exceeds else late


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the session of the process: bash cannot begin another."""
    for _ in range(100):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        others = list(_of_session(process.pid))
        for other in others:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        if not others:
            break
        time.sleep(0.01)
    process.wait()


def _of_session(session: int) -> Iterator[int]:
    """Living processes of the session (Linux)."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = status.read_text().rpartition(")")[2].split()
            if fields[3] == str(session) and fields[0] not in "ZX":
                yield int(status.parent.name)


def _calls(output: str) -> Iterator[tuple[str, list[str]]]:
    parts = iter(output.split("\0"))
    for part in parts:
        if part.endswith(_CALL):
            line, count = next(parts, ""), next(parts, "")
            yield line, [next(parts, "") for _ in range(int(count) if count.isdigit() else 0)]
