"""A stand-in for the Hugging Face hub: an HTTP server with models and data sets that a test puts there."""

import contextlib
import hashlib
import http.server
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ports import free_port

from dapo_jax.config import places

Files = dict[str, bytes]


@dataclass
class Repository:
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False  # its files, not their list

    def commit(self, files: Files, branch: str = "main") -> str:
        """A commit with exactly these files, to which the branch moves."""
        text = json.dumps({name: hashlib.sha1(content).hexdigest() for name, content in files.items()})
        found = hashlib.sha1(text.encode()).hexdigest()
        self.commits[found] = files
        self.branches[branch] = found
        return found


@dataclass
class Hub:
    """What is on the hub, by "models/OWNER/NAME" or "datasets/OWNER/NAME"."""

    address: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)  # files that were sent, by address
    asked: list[str] = field(default_factory=list)  # every address that was asked for

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())


def directory(path: Path) -> Files:
    """The files of a directory, to commit."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append(unquote(path))
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if len(parts) < 4:  # the library asks for other things too
            return self.answer(404)
        if parts[0] == "api":
            kind, owner, name, *rest = parts[1:]
            revision = rest[1] if rest else "main"
        else:
            kind = parts.pop(0) if parts[0] == "datasets" else "models"
            owner, name, _, revision, *rest = parts
        repository = self.hub.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            return self.answer(401, {"X-Error-Code": "RepoNotFound"})
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if parts[0] == "api" and rest[:1] == ["tree"]:  # huggingface_hub 2
            return self.answer(body=[_entry(name, content) for name, content in files.items()])
        if parts[0] == "api":
            siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
            return self.answer(body={"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})
        if repository.gated:
            return self.answer(401, {"X-Error-Code": "GatedRepo", "X-Repo-Commit": commit})
        if "/".join(rest) not in files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = files["/".join(rest)]
        if self.command == "GET":
            self.hub.downloads.append(unquote(path))
        self.answer(body=content, headers={"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit})

    def answer(self, status: int = 200, headers: dict[str, str] | None = None, body: object = None) -> None:
        """`body` is bytes, or an object that becomes JSON."""
        body = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving():
    """A hub without anything on it, for as long as the body runs."""
    handler = type("Handler", (_Handler,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.hub = hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def use(hub: Hub, cache: Path, monkeypatch) -> None:
    """Lets this process, and those that it starts, take `hub` for the Hugging Face hub, with a cache of its own."""
    from huggingface_hub import constants

    _choose(hub.address, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "huggingface" / "hub"))
    monkeypatch.setattr(places, "CACHE", cache / "dapo_jax")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)  # since 0.32
    monkeypatch.setenv("HF_HOME", str(cache / "huggingface"))


def unplug(monkeypatch) -> None:
    """From now on the hub does not answer."""
    _choose(f"http://127.0.0.1:{free_port()}", monkeypatch)


def _choose(address: str, monkeypatch) -> None:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "ENDPOINT", address)
    for module in (constants, file_download):  # before huggingface_hub 1.0 the second has its own
        name = "HUGGINGFACE_CO_URL_TEMPLATE"
        monkeypatch.setattr(module, name, address + "/{repo_id}/resolve/{revision}/{filename}", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
