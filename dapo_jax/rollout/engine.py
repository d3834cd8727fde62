"""Host: the rollout engine: prompts in, responses out.

All prompts of a request form one queue of slots, which go to the next response as soon as one has ended. The tokens
of a response depend on the weights, its prompt and the address of its draws (sampling.py); slots, pages, chunks,
devices and what ends first change the speed alone. queue.py decides what has which slot when, devices.py does it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import bucket
from dapo_jax.data.work import Work
from dapo_jax.errors import InputError
from dapo_jax.models.paged_attention import AttendPages
from dapo_jax.parallel.compilation import Programs
from dapo_jax.parallel.processes import settle
from dapo_jax.rollout.devices import QueueDevices
from dapo_jax.rollout.expert_records import ExpertRecords
from dapo_jax.rollout.layout import EngineSettings, Layout, cache_dtype
from dapo_jax.rollout.lengths import LearntSizes
from dapo_jax.rollout.programs import Calls, shaped
from dapo_jax.rollout.queue import needed_work
from dapo_jax.rollout.responses import Begun, OnFinished, Request, Responses
from dapo_jax.rollout.sampling import TRAIN
from dapo_jax.rollout.sizes import choose_layout


@dataclass(frozen=True)
class GivenUp:
    """What was begun and nobody waited for."""

    responses: int = 0  # with a token at least
    tokens: int = 0  # that the policy wrote
    work: Mapping[str, Work] = field(default_factory=dict)  # computed for them, by stage; none of it was needed


STOPS_LATE = (
    "rollout.stop ends turns after a device has gone on, and on CPUs a model with linear attention cannot go back: "
    "leave rollout.stop empty in episodes, or take another model"
)


class Engine:
    """Samples responses, under `jax.set_mesh` of the settings' mesh.

    Args:
        attend: attention to pages; None = each slot holds a stretch.
        check: called before each chunk; may raise to end the sampling.
    """

    def __init__(
        self, settings: EngineSettings, attend: AttendPages | None, check: Callable[[], None] = lambda: None
    ) -> None:
        self.settings, self.attend, self.check = settings, attend, check
        self.programs = Programs(settings.mesh)
        self.learnt = LearntSizes(settings.max_response_length, settings.mesh)
        self._open: QueueDevices | None = None

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        request: Request,
        *,
        begun: Begun | None = None,
        limits: np.ndarray | None = None,
        on_finished: OnFinished | None = None,
    ) -> "Pending":
        """Queues the responses to Q prompts; a new request begins a queue, once all of the one before is done.

        Args:
            prompts: token ids of each prompt.
            numbers: [Q] address of each prompt's draws; with the purpose, the sample and the position it fixes the
                noise.
            begun: responses to continue instead of new ones; num_samples must be 1.
            limits: [Q * num_samples] most tokens of each response, with those begun; None = max_response_length.
            on_finished: called with responses as they end, while others are still being decoded.
        """
        if request.waits is not None and request.stop is not None and self.attend is None and self.settings.arch.delta:
            raise InputError(STOPS_LATE)  # the state has then seen what comes after the stop
        devices = self._devices(request)
        settings, samples = self.settings, np.tile(np.arange(request.num_samples), len(prompts))
        longest, known = np.full(len(samples), settings.max_response_length), None
        responses = Responses(
            longest if limits is None else np.minimum(limits, longest),
            settings,
            stop=request.stop,
            waits=request.waits,
            turn_length=request.turn_length,
            begun=None if begun is None else begun.responses,
            on_finished=on_finished,
        )
        lengths = [len(prompt) for prompt in prompts]
        if begun is not None:
            assert request.num_samples == 1
            samples, known = begun.samples, begun.responses.experts
            continued = zip(prompts, responses.tokens, responses.begun, strict=True)
            prompts = [[*prompt, *tokens[:count].tolist()] for prompt, tokens, count in continued]
        if settings.choices is not None and request.purpose == TRAIN:
            responses.records = ExpertRecords(settings.choices, lengths, responses.begun, known)
        lengths = np.array([len(prompt) for prompt in prompts])
        first_row = devices.queue.add(lengths, responses.limits - responses.begun)
        devices.responses.parts[first_row] = responses
        rows = np.repeat(np.asarray(numbers, np.int64), request.num_samples)
        devices.add(prompts, rows, samples, responses.begun)
        return Pending(self, devices, first_row, lengths)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        request: Request,
        *,
        begun: Begun | None = None,
        limits: np.ndarray | None = None,
        on_finished: OnFinished | None = None,
        play: Callable[["Pending"], object] = lambda pending: None,
    ) -> Rollout:
        """`submit` of all prompts of a request, whose sizes are theirs, and `wait`, after `play` with the responses."""
        count, longer = len(prompts), 0
        if begun is not None:  # of any number: few sizes, so that few programs are compiled
            count, longer = bucket(count), begun.responses.mask.sum(axis=1)
        lengths = np.array([len(prompt) for prompt in prompts]) + longer
        most = None if limits is None else int(np.max(limits - longer))
        request = dataclasses.replace(request, prompt_lengths=lengths, num_prompts=count, max_tokens=most)
        try:
            pending = self.submit(prompts, numbers, request, begun=begun, limits=limits, on_finished=on_finished)
            play(pending)
            return pending.wait()
        finally:
            self.give_up()

    def step(self) -> bool:
        """Dispatches a chunk and takes the result of an earlier one; False if no response goes on."""
        if self._open is None:
            return False
        self.check()
        goes_on = self._open.queue.step(self._open, self._open.responses)
        settle(self._open.held)  # before processes exchange anything
        return goes_on

    def give_up(self) -> GivenUp:
        """Gives up all that has not been waited for."""
        devices, self._open = self._open, None
        if devices is None:
            return GivenUp()
        drawn = np.concatenate([np.zeros(0, np.int64), *(part.written() for part in devices.responses.parts.values())])
        devices.responses.parts.clear()
        devices.queue.release(devices.responses)
        return GivenUp(int(np.sum(drawn > 0)), int(drawn.sum()), devices.take_work())

    def layout(self, request: Request) -> Layout:
        """The sizes of a request's queue."""
        given = cache_dtype(request.params), request.prompt_lengths, request.num_samples
        counts = {"num_prompts": request.num_prompts, "max_tokens": request.max_tokens}
        known = self.learnt.history(request.purpose), self.learnt.free_memory()
        ends = {"returns": request.waits is not None, "stops": request.stop is not None}
        return choose_layout(self.settings, self.attend, *given, *known, **counts, **ends)

    def _devices(self, request: Request) -> QueueDevices:
        """Those that work off the queue of a request, new ones unless it is open."""
        if self._open is None or self._open.request is not request:
            assert self._open is None or not self._open.responses.parts, "an earlier request is under way: give it up"
            shapes = jax.tree.map(lambda x: shaped(x, x.sharding), request.params)
            limits = self.attend is None or request.sampling.limits  # CPUs have one program for all ways to draw
            calls = Calls(self.settings, shapes, self.layout(request), self.attend, limits)
            self._open = QueueDevices(calls, self.programs, request)
        return self._open

    def close(self) -> None:
        """Stops compiling in the background."""
        self.programs.close()


class Pending:
    """Responses to Q prompts that were submitted together; row b answers prompt b // num_samples."""

    def __init__(self, engine: Engine, devices: QueueDevices, first_row: int, prompt_lengths: np.ndarray) -> None:
        self._engine, self._devices, self._first_row = engine, devices, first_row
        self._prompt_lengths, self._responses = prompt_lengths, devices.responses.parts[first_row]

    @property
    def parked(self) -> np.ndarray:
        """Rows that wait for tokens of an environment."""
        return np.flatnonzero(self._responses.parked)

    def resume(self, row: int, tokens: Sequence[int]) -> None:
        """A row that waits goes on after these tokens. Until then it keeps its slot, or its pages and states while
        there are enough.

        Several processes resume and end the same rows, in the same order, between the same calls of `step`.

        Raises:
            InputError: it does not wait, or has no room for the tokens and one of the policy.
        """
        known = int(self._responses.drawn()[row])
        self._responses.append(row, tokens)
        self._devices.queue.resume(self._first_row + row, known)

    def end(self, row: int, tokens: Sequence[int] = (), *, complete: bool = True) -> None:
        """A row that waits ends; not `complete`: cut off, as by its limit.

        Args:
            tokens: of an environment, with which it ends; they may reach past its limit, and leave room for one of the
                policy before max_response_length.
        """
        if tokens:
            self._responses.append(row, tokens, self._engine.settings.max_response_length)
        self._responses.end(row, complete)

    def step(self) -> bool:
        """As `Engine.step`."""
        return self._engine.step()

    @property
    def ended(self) -> bool:
        """Whether all have ended."""
        return bool(self._responses.ended.all())

    def tokens(self, row: int) -> list[int]:
        """A row's tokens so far."""
        return self._responses.tokens[row, : self._responses.lengths[row]].tolist()

    def limit(self, row: int) -> int:
        """The most tokens that a row may have."""
        return int(self._responses.limits[row])

    def wait(self) -> Rollout:
        """Decodes until all of these responses have ended; once.

        `work` counts what the engine has computed since responses were last waited for, and what these needed
        (queue.py).

        Raises:
            RuntimeError: rows wait for tokens, and nothing else goes on.
        """
        engine, devices, responses = self._engine, self._devices, self._responses
        while not responses.ended.all():
            if not engine.step() and not responses.ended.all():
                raise RuntimeError(f"rows {self.parked.tolist()} wait for tokens: resume or end them")
        del devices.responses.parts[self._first_row]
        if not devices.responses.parts:
            devices.held = None  # nothing of it is needed
        drawn, lengths = responses.drawn(), self._prompt_lengths
        engine.learnt.history(devices.request.purpose).add(drawn)
        given = int(np.sum(drawn - responses.written()))
        needed = needed_work(engine.settings.arch, lengths, drawn.reshape(len(lengths), -1), given)
        rollout = dataclasses.replace(responses.rollout(), work=devices.take_work(needed))
        records = responses.records
        if records is None:
            return rollout
        prompts = None if responses.begun.any() else records.prompts
        return dataclasses.replace(rollout, experts=records.responses, prompt_experts=prompts)
