"""Host: one request to an OpenAI-compatible endpoint, `POST {base_url}/chat/completions`."""

import asyncio
import email.utils
import json
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dapo_jax.config.sections import JudgeConfig
from dapo_jax.errors import InputError

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 4 << 20  # of an answer
MAX_QUOTED = 200  # characters of an answer in an error
MAX_RETRY_AFTER_S = 300.0  # an endpoint that asks for more is asked again after this
_AGAIN = (408, 429)  # and 500 and above: statuses that may pass
_GIVEN_UP = ("abort", "error")  # finish_reason of servers that are shut down or fail


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


@dataclass(frozen=True)
class Endpoint:
    """An open connection to the judge of `settings`. Threads may share it.

    Its own thread waits for the answers: httpx limits only each read, and asyncio a whole request.
    """

    settings: JudgeConfig
    extra: dict[str, Any]  # further fields of a request; None leaves a field out
    client: "httpx.AsyncClient" = field(repr=False)
    key: str = field(repr=False)
    loop: asyncio.AbstractEventLoop = field(repr=False)

    def ask(self, prompt: str) -> Reply:
        """One attempt. RequestFailed if there is no reply."""
        import httpx

        body = {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": prompt.encode("utf-8", "replace").decode()}],
            "temperature": 0,
            "max_tokens": self.settings.max_tokens,
        } | self.extra
        body = {name: value for name, value in body.items() if value is not None}
        posted = asyncio.run_coroutine_threadsafe(self._post(json.dumps(body).encode()), self.loop)
        try:
            status, headers, content = posted.result()
        except (TimeoutError, httpx.TimeoutException) as error:
            raise RequestFailed(f"no answer within {self.settings.timeout_s:g} s", again=True) from error
        except httpx.TransportError as error:
            raise RequestFailed(self._clean(f"{type(error).__name__}: {error}"), again=True) from error
        if status != 200:
            text = self._clean(" ".join(content[:2000].decode("utf-8", "replace").split()))[:MAX_QUOTED]
            again = status in _AGAIN or status >= 500
            raise RequestFailed(f"HTTP status {status}: {text}", again=again, wait_s=_retry_after(headers))
        return self._read(content)

    def close(self) -> None:
        """Closes it."""
        asyncio.run_coroutine_threadsafe(self.client.aclose(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def _post(self, body: bytes) -> tuple[int, "httpx.Headers", bytes]:
        """Status, headers and content, all within timeout_s; else TimeoutError."""
        content = bytearray()
        url = f"{self.settings.base_url.rstrip('/')}/chat/completions"
        async with asyncio.timeout(self.settings.timeout_s), self.client.stream("POST", url, content=body) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MAX_BYTES:
                    raise RequestFailed(f"an answer of more than {MAX_BYTES >> 20} MiB")
            return response.status_code, response.headers, bytes(content)

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
        if self.settings.max_cost and not usage:
            raise RequestFailed("the answer has no usage, so reward.judge.max_cost cannot hold: set it to 0")
        return Reply(text, choice.get("finish_reason") != "length", *counts)

    def _clean(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


def open_endpoint(settings: JudgeConfig) -> Endpoint:
    """The endpoint of reward.judge. InputError if httpx or the key is missing."""
    try:
        import httpx
    except ImportError as error:
        raise InputError(
            f"reward.function=judge needs the library httpx ({error}): pip install 'dapo_jax[judge]'"
        ) from error
    key = os.environ.get(settings.api_key_env, "").strip() if settings.api_key_env else ""
    if settings.api_key_env and not (key and key.isascii() and key.isprintable()):
        raise InputError(
            f"reward.judge.api_key_env={settings.api_key_env!r} must be an environment variable that holds the key: "
            f"export {settings.api_key_env}=..., or set it to '' for an endpoint without keys"
        )
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    limits = httpx.Limits(max_connections=settings.max_concurrency, max_keepalive_connections=settings.max_concurrency)
    client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="judge requests", daemon=True).start()
    return Endpoint(settings, json.loads(settings.extra_body), client, key, loop)


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
