"""A stand-in for an OpenAI-compatible endpoint, in the place of httpx's network: it answers as a test says."""

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import httpx


@dataclass(frozen=True)
class Answer:
    """What the server sends."""

    text: str = "Well done.\nScore: 7"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None  # instead of a chat completion
    usage: dict[str, Any] | None = field(default_factory=lambda: {"prompt_tokens": 100, "completion_tokens": 20})
    finish_reason: str = "stop"
    wait_s: float = 0.0  # before the answer
    drip_s: float = 0.0  # between its bytes

    async def sent(self) -> AsyncIterator[bytes]:
        choice = {"message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish_reason}
        body = self.body if self.body is not None else json.dumps({"choices": [choice], "usage": self.usage})
        for byte in body.encode() if self.drip_s else ():
            await asyncio.sleep(self.drip_s)
            yield bytes([byte])
        if not self.drip_s:
            yield body.encode()


@dataclass
class JudgeServer:
    """Answers in the order of `script`, and then by `rule`."""

    base_url: str = "http://judge/v1"
    script: list[Answer] = field(default_factory=list)
    rule: Callable[[str], Answer] = lambda prompt: Answer()
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies of requests
    headers: list[httpx.Headers] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]

    @property
    def responses(self) -> list[str]:
        """What stood between the tags of the response."""
        found = [re.search(r"^<response-(\w+)>\n(.*)\n</response-\1>$", text, re.M | re.S) for text in self.prompts]
        return [match[2] if match else "" for match in found]

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if not str(request.url).startswith(self.base_url):
            raise httpx.ConnectError("no such host")
        assert request.method == "POST" and request.url.path == "/v1/chat/completions"
        self.asked.append(json.loads(request.content))
        self.headers.append(request.headers)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        answer = self.script.pop(0) if self.script else self.rule(self.prompts[-1])
        try:
            await asyncio.sleep(answer.wait_s)
        finally:
            self.at_once -= 1
        headers = {name: value.encode("latin-1") for name, value in answer.headers.items()}
        return httpx.Response(answer.status, headers=headers, content=answer.sent())


@contextlib.contextmanager
def judge_server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    client = functools.partial(httpx.AsyncClient, transport=httpx.MockTransport(server.answer))
    with mock.patch.object(httpx, "AsyncClient", client):
        yield server
