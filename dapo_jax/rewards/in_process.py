"""Host: a verifier that holds functions of this Python session, such as a notebook's, and runs in this process."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dapo_jax.rewards.messages import NO_VERDICT
from dapo_jax.rewards.verdicts import ScoreRequest, Verdict, Verifiers, encoded, no_verdict
from dapo_jax.rewards.verifiers import load_verifier
from dapo_jax.rewards.weighted import described
from dapo_jax.rewards.worker import answer

_log = logging.getLogger(__name__)


class InProcessVerifiers(Verifiers):
    """Scores samples one after the other in a thread of this process, without limits.

    Raises:
        InputError: the verifier cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        own: Mapping[str, Callable[..., Any]],
        *,
        error_score: float | None = None,
        pattern: str = "",
    ) -> None:
        """
        Args:
            own: the functions behind python:NAME, by NAME.
            pattern: of the verifier `format`.
        """
        super().__init__(name, error_score)
        self._verifier = load_verifier(name, own, pattern=pattern)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifier")
        _log.warning(
            "%s runs in this process, because no other can find it: without a limit of time or memory, though a "
            "model's responses are hostile text, and in one thread; define it with `def` at the top level of a file "
            "to have it run in worker processes",
            described(name),
        )

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Starts to score a request in the background."""
        return self._thread.submit(self._judge, request)

    def take_replaced(self) -> int:
        """0: there are no workers."""
        return 0

    def close(self) -> None:
        """Takes back what has not begun, and waits for no sample."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _judge(self, request: ScoreRequest) -> Verdict:
        message = encoded(request)
        if isinstance(message, str):
            return no_verdict(message)
        found = answer(self._verifier, message)
        if found.error == NO_VERDICT:
            return no_verdict(found.error)
        if found.error is not None:
            return self.wrong(request, found.error)
        return Verdict(found.numbers, found.pred, None)
