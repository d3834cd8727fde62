"""A stand-in for an OpenAI-compatible endpoint: an HTTP server that answers as a test says."""

import contextlib
import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


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
    endless_header: bool = False  # one that drips for ever


@dataclass
class JudgeServer:
    """Answers in the order of `script`, and then by `rule`."""

    base_url: str
    script: list[Answer] = field(default_factory=list)
    rule: Callable[[str], Answer] = lambda prompt: Answer()
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies of requests
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]

    @property
    def responses(self) -> list[str]:
        """What stood between the tags of the response."""
        found = [re.search(r"^<response-(\w+)>\n(.*)\n</response-\1>$", text, re.M | re.S) for text in self.prompts]
        return [match[2] if match else "" for match in found]


class _Handler(http.server.BaseHTTPRequestHandler):
    judge: JudgeServer

    def do_POST(self) -> None:
        judge = self.judge
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with judge.lock:
            assert self.path == "/v1/chat/completions"
            judge.asked.append(body)
            judge.headers.append(dict(self.headers))
            judge.at_once += 1
            judge.most_at_once = max(judge.most_at_once, judge.at_once)
            answer = judge.script.pop(0) if judge.script else judge.rule(body["messages"][0]["content"])
        time.sleep(answer.wait_s)
        with judge.lock:
            judge.at_once -= 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        if answer.endless_header:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            while True:
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.02)
        choice = {"message": {"role": "assistant", "content": answer.text}, "finish_reason": answer.finish_reason}
        body = answer.body if answer.body is not None else json.dumps({"choices": [choice], "usage": answer.usage})
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(body.encode()))}.items():
            self.send_header(name, value)
        self.end_headers()
        for part in [bytes([byte]) for byte in body.encode()] if answer.drip_s else [body.encode()]:
            self.wfile.write(part)
            self.wfile.flush()
            time.sleep(answer.drip_s)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def judge_server() -> Iterator[JudgeServer]:
    handler = type("Handler", (_Handler,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.judge = JudgeServer(f"http://127.0.0.1:{server.server_port}/v1")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield handler.judge
    finally:
        server.shutdown()
        server.server_close()
