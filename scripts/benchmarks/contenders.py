"""Host: contenders of a benchmark, each in its own process, so peers can have their own environment; one at a time.

A contender is an object with

    __call__(case)    does the work once and returns (tokens, seconds); NotImplementedError leaves the case out
    limit(case)       a dict with "limit", the tokens per second of a perfect program; only dapo_jax
    peak()            the most bytes that it has taken so far
"""

import argparse
import importlib.metadata
import json
import os
import queue
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from random_models import SHAPES

PACKAGES = ("jax", "jaxlib", "torch", "transformers", "trl", "google-tunix")


def seconds_of(function: Callable[[], Any]) -> float:
    """Wall time."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def device_limits() -> Any:
    """The peak speeds of JAX's first device."""
    import jax

    from dapo_jax.parallel.devices import limits_of

    return limits_of(jax.devices()[0])


def jax_peak(jax: Any) -> float:
    """The most bytes that JAX has held on its first device; on a CPU, that the process has."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else max_rss()


def max_rss() -> float:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of those of the packages that are installed, and of Python."""
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Turns:
    """Has another library's training loop take one step at a time.

    The loop runs in a thread and calls `wait_for_turn` before every step.
    """

    def __init__(self, loop: Callable[["Turns"], None]) -> None:
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(loop,), daemon=True).start()
        self._until_ready()

    def _run(self, loop: Callable[["Turns"], None]) -> None:
        try:
            loop(self)
            raise RuntimeError("the training loop has ended")
        except BaseException as error:
            self._ready.put(error)

    def _until_ready(self) -> None:
        error = self._ready.get()
        if error is not None:
            raise error

    def wait_for_turn(self) -> None:
        """Called by the loop: the step before has ended."""
        self._ready.put(None)
        self._asked.get()

    def take(self) -> float:
        """Has the loop take a step and returns its seconds."""
        start = time.perf_counter()
        self._asked.put(None)
        self._until_ready()
        return time.perf_counter() - start


def serve(contender_name: str, build: Callable[[str, str], Any]) -> None:
    """A contender's process: reads one request per line, does the work of its case, and writes time and memory."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints does not mix with the replies
    name, dtype = contender_name.rsplit(":", 1)
    contender = build(name, dtype)
    print(json.dumps({"versions": versions()}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        try:
            if request.get("limit"):
                reply |= contender.limit(request["case"])
            else:
                tokens, seconds = contender(request["case"])
                reply |= {"tokens": tokens, "seconds": seconds, "peak": contender.peak()}
        except NotImplementedError as error:
            reply["skipped"] = str(error)
        print(json.dumps(reply), file=replies, flush=True)


class Contender:
    """A process that works on request."""

    def __init__(self, script: str, name: str, dtype: str, python: str, arguments: Sequence[str]) -> None:
        self.name, self.dtype, self.ours = f"{name} {dtype}", dtype, name.startswith("dapo_jax")
        self.errors = tempfile.TemporaryFile("w+")
        self.versions: dict[str, str] = {}
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }  # the contenders share an accelerator
        self.process = subprocess.Popen(
            [python, script, *arguments, "--serve", f"{name}:{dtype}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )

    def ready(self) -> bool:
        """Whether it has started; false if its packages are missing."""
        self.versions = self._reply().get("versions", {})
        return bool(self.versions)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Its answer to a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        reply = self._reply()
        if not reply:
            raise RuntimeError(f"{self.name} has ended: {self.last_error()}")
        return reply

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def last_error(self) -> str:
        """The last line that it wrote to its error output."""
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or ["no message"])[-1]

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


@dataclass
class Result:
    """Time and memory of a contender for a case."""

    contender: Contender
    first: float  # seconds of the first call, compilation included
    seconds: list[float]  # of the others
    tokens: int
    peak: float  # bytes

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / statistics.median(self.seconds)

    def row(self, ours: "Result", limit: float | None) -> dict[str, Any]:
        """Its row of the table."""
        return {
            "contender": self.contender.name,
            "tokens/s": self.speed,
            "ours / it": ours.speed / self.speed,
            "of the limit": self.speed / limit if limit is not None else None,
            "limit tokens/s": limit,
            "first s": self.first,
            "peak GiB": self.peak / 2**30,
            "seconds": self.seconds,
        }


def start_contenders(
    script: str, wanted: Sequence[tuple[str, str]], args: argparse.Namespace, arguments: Sequence[str]
) -> list[Contender]:
    """The processes of the (name, dtype) that are wanted, each with the python of --peers, else this one."""
    pythons = dict(peer.split("=", 1) for peer in args.peers)
    contenders = []
    for name, dtype in wanted:
        contender = Contender(script, name, dtype, pythons.get(name, sys.executable), arguments)
        if contender.ready():
            contenders.append(contender)
            continue
        contender.close()
        if contender.ours:
            for started in contenders:
                started.close()
            raise RuntimeError(f"{contender.name} did not start: {contender.last_error()}")
        print(f"{name} is left out: {contender.last_error()}", flush=True)
    return contenders


def take_turns(contenders: Sequence[Contender], case: str, repeats: int) -> list[Result]:
    """All contenders that take part in the case: a first call of each, then `repeats` rounds."""
    results = []
    for contender in contenders:
        first = contender.ask(case=case)
        if "skipped" not in first:
            results.append(Result(contender, first["seconds"], [], first["tokens"], first["peak"]))
    for _ in range(repeats):
        for result in results:
            reply = result.contender.ask(case=case)
            result.seconds.append(reply["seconds"])
            result.tokens, result.peak = reply["tokens"], reply["peak"]
    return results


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all these benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=64, help="responses")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of dapo_jax; peers: the first")
    parser.add_argument("--peers", nargs="*", default=[], help="NAME=PYTHON of the peers, where not this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser


def write_output(args: argparse.Namespace, **found: Any) -> None:
    """Writes the arguments and the results as JSON to --output."""
    if args.output:
        shown = {name: value for name, value in vars(args).items() if name not in ("output", "serve", "peers")}
        args.output.write_text(json.dumps({**shown, **found}, indent=1) + "\n", encoding="utf-8")
