"""Host: a process that renders conversations: `python -m dapo_jax.data.template_worker`.

`chat_template.py` starts it. It reads one JSON object from stdin (`main`), and writes a line of JSON with the variables
that the template reads, and one for each conversation: its text, or, as the last line, the fields of its Failure.
"""

import json
import resource
import signal
import sys

from dapo_jax.data.template_sandbox import render, variables_read

MAX_TOTAL_LENGTH = 2**30  # characters of all texts


def _answer(found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    request = json.load(sys.stdin)
    template, time_limit_s, memory_limit_mb = (request[key] for key in ("template", "time_limit_s", "memory_limit_mb"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most, allowed = memory_limit_mb << 20, resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # of writable memory
    # The system's own answer to SIGALRM ends the process even within a long call into C, where Python handles nothing.
    signal.setitimer(signal.ITIMER_REAL, time_limit_s)
    _answer(variables_read(template))
    total = 0
    for conversation in request["conversations"]:
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        found = render(template, **conversation)
        _answer(found)
        total += len(found)
        if not isinstance(found, str) or total > MAX_TOTAL_LENGTH:
            return


if __name__ == "__main__":
    main()
