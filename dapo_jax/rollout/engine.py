"""Host: the rollout engine: prompts in, responses out.

All prompts of a request form one queue of slots, which go to the next response as soon as one has ended. The tokens
of a response depend on the weights, its prompt and the address of its draws (sampling.py); slots, pages, chunks,
devices and what ends first change the speed alone. queue.py decides what has which slot when, devices.py does it.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dapo_jax.data.containers import Rollout
from dapo_jax.data.padding import bucket
from dapo_jax.data.work import Work
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import AttendPages, attend_gathered
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.devices import cuda_generation
from dapo_jax.parallel.mesh import platform
from dapo_jax.rollout.devices import QueueDevices
from dapo_jax.rollout.expert_records import ExpertRecords
from dapo_jax.rollout.layout import CHUNK, EngineSettings, Layout, cache_dtype, choose_layout
from dapo_jax.rollout.lengths import LearntSizes
from dapo_jax.rollout.programs import Calls, Programs
from dapo_jax.rollout.queue import Queue
from dapo_jax.rollout.responses import JoinedResponses, OnFinished, Responses, StopRule, Waits
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.rollout.work import needed_work, work_of

logger = logging.getLogger(__name__)

AMPERE = 8  # the compute capability from which Triton compiles


@dataclass(frozen=True, eq=False)
class Request:
    """How prompts are sampled. Those of one request share a queue, whose sizes follow from the last fields."""

    params: Params  # decoding weights (learner/decode_weights.py), with the same shapes and dtypes in all requests
    num_samples: int  # responses to each prompt
    purpose: int  # training, evaluation, ... (sampling.py)
    sampling: Sampling
    prompt_lengths: np.ndarray  # [N] tokens of prompts like those that will be submitted, of which none is longer
    num_prompts: int  # that will be submitted, about
    max_tokens: int | None = None  # most to draw for a response; None = max_response_length
    stop: StopRule | None = None  # ends a response at a stop string
    waits: Waits | None = None  # whether a response that has ended waits for tokens of an environment; None = none does


@dataclass(frozen=True)
class Begun:
    """Responses to continue, one to each of Q prompts."""

    samples: np.ndarray  # [Q], which sample of its prompt each is: with the prompt's number the address of its draws
    responses: Rollout  # Q rows: the tokens drawn so far, and their log-probabilities


@dataclass(frozen=True)
class GivenUp:
    """What was begun and nobody waited for."""

    responses: int = 0  # with a token at least
    tokens: int = 0
    work: Mapping[str, Work] = field(default_factory=dict)  # computed for them, by stage; none of it was needed


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
        self._param_shapes: Params | None = None
        self._open: _Open | None = None

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
        if self._open is None or self._open.request is not request:
            assert self._open is None or not self._open.responses.parts, "an earlier request is under way: give it up"
            self._open = _Open(self, request)
        settings, samples = self.settings, np.tile(np.arange(request.num_samples), len(prompts))
        longest = settings.max_response_length
        responses = Responses(
            np.full(len(samples), longest) if limits is None else np.minimum(limits, longest),
            max_length=longest,
            eos_ids=settings.eos_ids,
            pad_id=settings.pad_id,
            begun=None if begun is None else begun.responses,
            stop=request.stop,
            waits=request.waits,
            on_finished=on_finished,
        )
        if settings.choices is not None and request.purpose == TRAIN:
            known = None if begun is None else begun.responses.experts
            lengths = [len(prompt) for prompt in prompts]
            responses.records = ExpertRecords(settings.choices, lengths, responses.begun, known)
        if begun is not None:
            assert request.num_samples == 1
            samples = begun.samples
            prompts = [[*prompt, *response] for prompt, response in zip(prompts, responses.begun_tokens(), strict=True)]
        rows = np.repeat(np.asarray(numbers, np.int64), request.num_samples)
        return self._open.add(prompts, rows, samples, responses)

    def step(self) -> bool:
        """Dispatches a chunk and takes the result of an earlier one; False if no response goes on."""
        return self._open is not None and self._open.step()

    def give_up(self) -> GivenUp:
        """Gives up all that has not been waited for."""
        opened, self._open = self._open, None
        return GivenUp() if opened is None else opened.give_up()

    def generate(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        *,
        num_samples: int,
        purpose: int,
        sampling: Sampling,
        stop: StopRule | None = None,
        begun: Begun | None = None,
        limits: np.ndarray | None = None,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """A request whose prompts are all known. Arguments are those of `Request` and `submit`."""
        count, longer = len(prompts), 0
        if begun is not None:  # of any number: few sizes, so that few programs are compiled
            count, longer = bucket(count), begun.responses.mask.sum(axis=1)
        request = Request(
            params,
            num_samples,
            purpose,
            sampling,
            prompt_lengths=np.array([len(prompt) for prompt in prompts]) + longer,
            num_prompts=count,
            max_tokens=None if limits is None else int(np.max(limits - longer)),
            stop=stop,
        )
        pending = self.submit(prompts, numbers, request, begun=begun, limits=limits, on_finished=on_finished)
        try:
            return pending.wait()
        finally:
            self.give_up()

    def layout(self, request: Request) -> Layout:
        """The sizes of a request's queue."""
        return choose_layout(
            self.settings,
            self.attend,
            cache_dtype(request.params),
            request.prompt_lengths,
            request.num_samples,
            self.learnt.history(request.purpose),
            self.learnt.free_memory(),
            num_prompts=request.num_prompts,
            max_tokens=request.max_tokens,
        )

    def param_shapes(self, params: Params) -> Params:
        """Shapes and shardings of the decoding weights, which are the same in every request."""
        shapes = self._param_shapes
        if shapes is None:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
            self._param_shapes = shapes
        return shapes

    def state(self) -> dict[str, np.ndarray]:
        """What the sizes of the next request depend on, for a checkpoint."""
        return self.learnt.state()

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.learnt.restore(arrays)

    def close(self) -> None:
        """Stops compiling in the background."""
        self.programs.close()


class _Open:
    """The queue of a request."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request, self.responses = engine, request, JoinedResponses()
        settings, returns = engine.settings, request.waits is not None
        layout = engine.layout(request)
        calls = Calls(settings, engine.param_shapes(request.params), layout, engine.attend, returns)
        self.devices = QueueDevices(
            calls,
            engine.programs,
            request.params,
            sampling=request.sampling,
            purpose=request.purpose,
            responses=self.responses,
        )
        self.queue = Queue(layout, lookahead=settings.lookahead, returns=returns)

    def add(
        self, prompts: Sequence[Sequence[int]], numbers: np.ndarray, samples: np.ndarray, responses: Responses
    ) -> "Pending":
        lengths = np.array([len(prompt) for prompt in prompts])
        first_row = self.queue.add(lengths, responses.room())
        self.responses.parts[first_row] = responses
        self.devices.add(prompts, numbers, samples, responses.begun)
        return Pending(self, first_row, lengths, responses)

    def step(self) -> bool:
        self.engine.check()
        return self.queue.step(self.devices, self.responses)

    def give_up(self) -> GivenUp:
        drawn = np.concatenate([np.zeros(0, np.int64), *(part.drawn() for part in self.responses.parts.values())])
        self.responses.parts.clear()
        self.queue.release(self.responses)
        computed = self.devices.counted.take_computed()
        return GivenUp(int(np.sum(drawn > 0)), int(drawn.sum()), work_of(computed, dict.fromkeys(computed, 0.0)))


class Pending:
    """Responses to Q prompts that were submitted together; row b answers prompt b // num_samples."""

    def __init__(self, opened: _Open, first_row: int, prompt_lengths: np.ndarray, responses: Responses) -> None:
        self._opened, self._first_row = opened, first_row
        self._prompt_lengths, self._responses = prompt_lengths, responses

    @property
    def parked(self) -> np.ndarray:
        """Rows that wait for tokens of an environment."""
        return np.flatnonzero(self._responses.parked)

    def resume(self, row: int, tokens: Sequence[int]) -> None:
        """A row that waits goes on after these tokens. Until then it keeps its pages, if there are enough.

        Raises:
            InputError: it does not wait, or has no room for the tokens and one of the policy.
        """
        known = int(self._responses.drawn()[row])
        self._responses.append(row, tokens)
        self._opened.queue.resume(self._first_row + row, known)

    def end(self, row: int) -> None:
        """A row that waits ends as it is."""
        self._responses.end(row)

    def wait(self) -> Rollout:
        """Decodes until all of these responses have ended; once.

        `work` counts what the engine has computed since responses were last waited for, and what these needed
        (work.py).

        Raises:
            RuntimeError: rows wait for tokens, and nothing else goes on.
        """
        opened, responses = self._opened, self._responses
        while not responses.ended.all():
            if not opened.step() and not responses.ended.all():
                raise RuntimeError(f"rows {self.parked.tolist()} wait for tokens: resume or end them")
        del opened.responses.parts[self._first_row]
        if not opened.responses.parts:
            opened.devices.free()
        drawn = responses.drawn()
        opened.engine.learnt.history(opened.request.purpose).add(drawn)
        lengths = self._prompt_lengths
        needed = needed_work(opened.engine.settings.arch, lengths, drawn.reshape(len(lengths), -1))
        work = work_of(opened.devices.counted.take_computed(), needed)
        rollout = dataclasses.replace(responses.rollout(), work=work)
        records = responses.records
        if records is None:
            return rollout
        prompts = None if responses.begun.any() else records.prompts
        return dataclasses.replace(rollout, experts=records.responses, prompt_experts=prompts)


def build_engine(settings: EngineSettings, check: Callable[[], None] = lambda: None) -> Engine:
    """The engine for the devices of the mesh; the log says if no kernel attends to pages there."""
    attend, needed = page_attention(settings)
    if needed:
        logger.warning("attention to pages gathers them, which is slow: its kernel needs %s", needed)
    return Engine(settings, attend, check)


def page_attention(settings: EngineSettings) -> tuple[AttendPages | None, str]:
    """Attention to pages for the devices of the mesh, None on CPUs; what a kernel would need, "" if there is one."""
    device, size, length = platform(settings.mesh), settings.arch.head_dim, settings.chunk_length or CHUNK
    if device == "cpu":
        return None, ""
    capability = cuda_generation(settings.mesh.devices.flat[0])
    if capability is not None and capability < AMPERE:
        return attend_gathered, f"compute capability {AMPERE}.0, not {capability}"
    if device == "tpu":
        fits, numbers = size % 64 == 0 and length % 16 == 0, "multiples of 64 and 16"
        kernel = paged_attention_tpu.attend
    else:
        fits = all(number >= 16 and number.bit_count() == 1 for number in (size, length))
        numbers, kernel = "powers of two from 16 on", paged_attention_gpu.attend
    needed = f"a head size and a rollout.decode_chunk_length that are {numbers}, not {size} and {length}"
    return (kernel, "") if fits else (attend_gathered, needed)
