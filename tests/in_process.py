"""Verifiers without a process, for tests of what uses them."""

from concurrent.futures import ThreadPoolExecutor

from dapo_jax.rewards.messages import NO_VERDICT
from dapo_jax.rewards.verdicts import Verdict, Verifiers, encoded, no_verdict
from dapo_jax.rewards.verifiers import load_verifier
from dapo_jax.rewards.worker import answer


class InThisProcess(Verifiers):
    """Scores in one thread of this process, in the place of a VerifierPool.

    Args:
        own: functions by name, as `load_verifier` takes them.
    """

    def __init__(self, name, *, own=None, error_score=None, pattern="", **_settings):
        super().__init__(name, error_score)
        self._verifier = load_verifier(name, own or {}, pattern=pattern)
        self._thread = ThreadPoolExecutor(1)

    def submit(self, request):
        return self._thread.submit(self._score, request)

    def take_replaced(self):
        return 0

    def close(self):
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _score(self, request):
        found = answer(self._verifier, encoded(request))
        if found.error == NO_VERDICT:
            return no_verdict(found.error)
        return self.wrong(request, found.error) if found.error else Verdict(found.numbers, found.pred, None)
