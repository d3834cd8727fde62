"""Host: how one of several processes ends after a failure, so that every process tells its reason."""

import logging
import os
import re
import sys
import time
import traceback
from contextlib import suppress

import jax

from dapo_jax.errors import say
from dapo_jax.parallel.cluster import jax_client

FAILURE = "dapo_jax/failure"  # key in JAX's key-value store for the message of the first process that fails
LOST = "UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED"  # prefixes of errors after a lost connection
TOGETHER_S = 10  # how long a process that fails waits for the others to fail too


def is_jax_failure(error: BaseException | None) -> bool:
    """Whether JAX failed to run a program. Fetching a result after a lost connection raises ValueError."""
    if isinstance(error, ValueError):
        return re.match(rf"({LOST}): ", str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError)


def end_process(error: BaseException, heartbeat_timeout_s: int) -> None:
    """Ends this process after a failure; if another has failed before, it says why.

    A SystemExit has already printed its reason, and carries the error as its cause.
    """
    cause = error.__cause__ if isinstance(error, SystemExit) else error
    lost = is_jax_failure(cause) and "RESOURCE_EXHAUSTED" not in str(cause)  # usually because another has ended
    failure = _failure_of_another(cause, 1.5 * heartbeat_timeout_s) if lost else None
    if failure is not None:
        say(f"dapo_jax: {failure}", file=sys.stderr)
    elif cause is not None:
        _tell_others(cause)
    if not isinstance(error, SystemExit):
        say("".join(traceback.format_exception(error)), file=sys.stderr)
        code = 1
    elif isinstance(error.code, str):
        say(f"{error.code} (process {jax.process_index()})", file=sys.stderr)
        code = 1
    else:
        code = error.code or 0
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(cause, Exception) and not lost:
        _leave_together()
    os._exit(code)


def _leave_together() -> None:
    """Leaves JAX's service with the other processes if all have failed, as wrong input makes them.

    If process 0 just ended, JAX would abort those that have not printed their reason yet: the service ends with it.
    """
    client = jax_client()
    if client is None:
        return
    with suppress(jax.errors.JaxRuntimeError):  # others go on: they will notice when this process has ended
        client.wait_at_barrier("dapo_jax/end", 1000 * TOGETHER_S)
        jax.distributed.shutdown()


def _tell_others(cause: BaseException) -> None:
    """Tells the other processes that this one has failed, unless another has failed before."""
    client = jax_client()
    if client is None:
        return
    reason = str(cause).partition("\n")[0] or type(cause).__name__
    with suppress(jax.errors.JaxRuntimeError):  # another process has failed before, or process 0 has ended
        client.key_value_set(FAILURE, f"process {jax.process_index()} has failed: {reason}")


def _failure_of_another(cause: BaseException | None, limit_s: float) -> str | None:
    """Prints what JAX says; returns why the first process failed, or None if it gave none.

    A killed process tells nothing. JAX's service notices within `limit_s` and ends this process with a message
    that names it.
    """
    say(
        f"dapo_jax: process {jax.process_index()} cannot continue: {str(cause).partition(chr(10))[0]}\n"
        "dapo_jax: usually another process has ended; its reason, or what JAX has noticed, follows",
        file=sys.stderr,
    )
    client = jax_client()
    if client is None:
        time.sleep(limit_s)
        return None
    try:
        return client.blocking_key_value_get(FAILURE, int(1000 * limit_s))
    except jax.errors.JaxRuntimeError:
        return None
