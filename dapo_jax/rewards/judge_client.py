"""Host: requests to an OpenAI-compatible endpoint, `POST {base_url}/chat/completions`, and their pace if it fails.

All of it runs in one event loop.
"""

import asyncio
import email.utils
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dapo_jax.config.sections import JudgeConfig
from dapo_jax.errors import InputError

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 4 << 20  # of an answer
MAX_QUOTED = 200  # characters of an answer in an error
MAX_RETRY_AFTER_S = 300.0  # an endpoint that asks for more gets a new request after this
BROKEN_AFTER = 8  # failures that may pass, in a row
MAX_PROBE_WAIT_S = 60.0  # between two requests to an endpoint that does not answer
_WARN_EVERY_S = 60.0
_AGAIN = (408, 429)  # and 500 and above: statuses that may pass
_GIVEN_UP = ("abort", "error")  # finish_reason of servers that are shut down or fail

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """What an endpoint answered."""

    text: str
    complete: bool  # False: cut off at max_tokens
    input_tokens: int
    output_tokens: int


class RequestFailed(Exception):
    """There is no reply. The message never contains the key."""

    def __init__(self, message: str, *, again: bool = False, wait_s: float = 0.0) -> None:
        """
        Args:
            again: whether another attempt may succeed.
            wait_s: what the endpoint asks to wait before it.
        """
        super().__init__(message)
        self.again, self.wait_s = again, wait_s


class Endpoint:
    """The judge of `settings`."""

    def __init__(self, settings: JudgeConfig) -> None:
        """InputError if httpx or the key is missing."""
        try:
            import httpx
        except ImportError as error:
            raise InputError(
                f"reward.function=judge needs the library httpx ({error}): pip install 'dapo_jax[judge]'"
            ) from error
        key = os.environ.get(settings.api_key_env, "").strip() if settings.api_key_env else ""
        if settings.api_key_env and not (key and key.isascii() and key.isprintable()):
            raise InputError(
                f"reward.judge.api_key_env={settings.api_key_env!r} must be an environment variable that holds the "
                f"key: export {settings.api_key_env}=..., or set it to '' for an endpoint without keys"
            )
        self._settings, self._key = settings, key
        self._extra = json.loads(settings.extra_body)  # further fields of a request; None leaves a field out
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        most = settings.max_concurrency
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=most)
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits)
        self.close = self._client.aclose

    async def ask(self, prompt: str) -> Reply:
        """One attempt. RequestFailed if there is no reply."""
        import httpx

        settings, content = self._settings, bytearray()
        body = {
            "model": settings.model,
            "messages": [{"role": "user", "content": prompt.encode("utf-8", "replace").decode()}],
            "temperature": 0,
            "max_tokens": settings.max_tokens,
        } | self._extra
        body = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        url = f"{settings.base_url.rstrip('/')}/chat/completions"
        try:  # httpx limits only each read, and asyncio the whole request
            async with asyncio.timeout(settings.timeout_s), self._client.stream("POST", url, content=body) as response:
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > MAX_BYTES:
                        raise RequestFailed(f"an answer of more than {MAX_BYTES >> 20} MiB")
        except (TimeoutError, httpx.TimeoutException) as error:
            raise RequestFailed(f"no answer within {settings.timeout_s:g} s", again=True) from error
        except httpx.TransportError as error:
            raise RequestFailed(self._clean(f"{type(error).__name__}: {error}"), again=True) from error
        status = response.status_code
        if status != 200:
            text = self._clean(" ".join(content[:2000].decode("utf-8", "replace").split()))[:MAX_QUOTED]
            again = status in _AGAIN or status >= 500
            raise RequestFailed(f"HTTP status {status}: {text}", again=again, wait_s=_retry_after(response.headers))
        return self._read(bytes(content))

    def _read(self, content: bytes) -> Reply:
        try:
            answer = json.loads(content)
            choice = answer["choices"][0]
            if choice.get("finish_reason") in _GIVEN_UP:
                raise RequestFailed(f"the endpoint gave up (finish_reason={choice['finish_reason']!r})", again=True)
            text, usage = choice["message"]["content"], answer.get("usage") or {}
            counts = [usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")]
            if not isinstance(text, str) or not all(type(count) is int and 0 <= count < 1 << 40 for count in counts):
                raise TypeError("content must be text, and usage whole numbers")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            start = self._clean(content[:2000].decode("utf-8", "replace"))[:MAX_QUOTED]
            raise RequestFailed(f"the answer is not a chat completion ({error!r}): {start!r}") from error
        if self._settings.max_cost and not usage:
            raise RequestFailed("the answer has no usage, so reward.judge.max_cost cannot hold: set it to 0")
        return Reply(text, choice.get("finish_reason") != "length", *counts)

    def _clean(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _retry_after(headers: "httpx.Headers") -> float:
    """Seconds that the header Retry-After asks for, as a number or a date, at most MAX_RETRY_AFTER_S; 0 without one."""
    given = headers.get("retry-after", "")
    if given.isascii() and given.isdigit():
        return min(float(given[:9]), MAX_RETRY_AFTER_S)
    try:
        left = email.utils.parsedate_to_datetime(given).timestamp() - time.time()
        return min(max(left, 0.0), MAX_RETRY_AFTER_S)
    except (ValueError, OverflowError):
        return 0.0


class Breaker:
    """Counts failures in a row that may pass. After BROKEN_AFTER one request at a time probes, until one is answered.

    The others wait instead of using up their retries. Each wait between two probes is twice as long as the last.
    """

    def __init__(self, judge: str, *, patience_s: float, wait_s: float) -> None:
        """
        Args:
            judge: its name in messages.
            patience_s: seconds of probing, after which no request may begin.
            wait_s: before the first probe.
        """
        self._judge, self._patience_s, self._wait_s = judge, patience_s, wait_s
        self._failures = self._failed_probes = 0  # in a row
        self._broken_at: float | None = None  # None: it answers; as the next two, of time.monotonic()
        self._probe_at, self._warned_at = 0.0, -_WARN_EVERY_S
        self._lost = self._stopped = False
        self._probing, self._woken = asyncio.Lock(), asyncio.Event()

    async def attempt(self, ask: Callable[[], Awaitable[Reply]]) -> Reply:
        """`await ask()`, once a request may begin.

        Raises:
            RequestFailed: by `ask`; or `stop` was called.
            RuntimeError: the judge has not answered for patience_s.
        """
        if self._broken_at is not None:
            async with self._probing:
                if await self._may_probe():
                    return await self._watched(ask, probes=True)
        return await self._watched(ask, probes=False)

    def stop(self) -> None:
        """Ends all waits."""
        self._stopped = True
        self._woken.set()

    async def _may_probe(self) -> bool:
        """Waits until it is time for a probe; False if another request has been answered meanwhile."""
        while self._broken_at is not None and not self._stopped:
            if self._lost:
                raise RuntimeError(
                    f"{self._judge} has not answered for reward.judge.patience_s={self._patience_s:g} s: see that "
                    "it runs, then rerun the same command (answers so far are kept)"
                )
            left = self._probe_at - time.monotonic()
            if left <= 0:
                return True
            await set_within(self._woken, left)
        if self._stopped:
            raise RequestFailed("the run ended")
        return False

    async def _watched(self, ask: Callable[[], Awaitable[Reply]], *, probes: bool) -> Reply:
        try:
            reply = await ask()
        except RequestFailed as failure:
            self._failed(failure, probes) if failure.again else self._answered()
            raise
        self._answered()
        return reply

    def _failed(self, failure: RequestFailed, probes: bool) -> None:
        self._failures += 1
        self._failed_probes += probes
        if self._failures < BROKEN_AFTER:
            return
        now = time.monotonic()
        if self._broken_at is None:
            self._broken_at = now
            self._woken.clear()
            warns = now >= self._warned_at + _WARN_EVERY_S
            self._warned_at = now if warns else self._warned_at
            _log.log(
                logging.WARNING if warns else logging.INFO,
                "%s fails: %d failures in a row, the last with %s. It gets one request at a time until it "
                "answers; after reward.judge.patience_s=%g s the run ends",
                *(self._judge, self._failures, failure, self._patience_s),
            )
        end = self._broken_at + self._patience_s
        wait = min(self._wait_s * 2.0 ** min(self._failed_probes, 30), MAX_PROBE_WAIT_S)
        self._probe_at = min(now + max(wait, failure.wait_s), max(end, now))  # the last probe is at the end
        self._lost = self._lost or (probes and now >= end)

    def _answered(self) -> None:
        self._failures = self._failed_probes = 0
        if self._broken_at is not None:
            _log.info("%s answers again after %.0f s", self._judge, time.monotonic() - self._broken_at)
            self._broken_at = None
            self._woken.set()


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether `event` is set within so many seconds."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
