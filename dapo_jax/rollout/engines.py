"""Host: which rollout engine a run has, and why."""

import functools
import logging
from collections.abc import Callable

import numpy as np

from dapo_jax.errors import InputError
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import AttendPages, attend_gathered
from dapo_jax.models.transformer import Params
from dapo_jax.parallel.mesh import platform
from dapo_jax.rollout.engine import RolloutEngine
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.round_plan import RoundPlan
from dapo_jax.rollout.segment_plan import plan_segments
from dapo_jax.rollout.slot_plan import plan_slots
from dapo_jax.rollout.slots import SlotEngine
from dapo_jax.rollout.wave_plan import plan_waves
from dapo_jax.rollout.waves import WaveEngine

logger = logging.getLogger(__name__)


def build_engine(wanted: str, settings: EngineSettings, check: Callable[[], None] = lambda: None) -> RolloutEngine:
    """The engine of rollout.engine, "waves", "slots" or "auto".

    Args:
        check: called before each chunk; may raise to end the sampling.

    Raises:
        InputError: the devices' kernel for slots does not take the model or the chunk length.
    """
    chosen, reason = choose_engine(wanted, settings)
    what = "slots and pages" if chosen == "slots" else "waves"
    logger.info(
        "rollout.engine=%s: responses are decoded in %s%s", chosen, what, f" (auto: {reason})" if reason else ""
    )
    return SlotEngine(settings, page_attention(settings), check) if chosen == "slots" else WaveEngine(settings, check)


def plan_round(
    wanted: str,
    settings: EngineSettings,
    weights: Params,
    *,
    segment_length: int = 0,
    response_lengths: np.ndarray,
    prompt_lengths: np.ndarray,
    free_bytes: float,
) -> RoundPlan:
    """The round of `build_engine`'s engine, see `plan_waves`; with segment_length above 0 see `plan_segments`."""
    plan = plan_waves
    if choose_engine(wanted, settings)[0] == "slots":
        attend = page_attention(settings)
        plan = functools.partial(plan_slots, attend_pages=attend, max_tokens=segment_length or None)

    def planned(responses: np.ndarray, prompts: np.ndarray) -> RoundPlan:
        return plan(settings, weights, response_lengths=responses, prompt_lengths=prompts, free_bytes=free_bytes)

    if not segment_length:
        return planned(response_lengths, prompt_lengths)
    return plan_segments(planned, segment_length, response_lengths=response_lengths, prompt_lengths=prompt_lengths)


def choose_engine(wanted: str, settings: EngineSettings) -> tuple[str, str]:
    """ "waves" or "slots" for rollout.engine, and why; "" if the option says it."""
    if wanted != "auto":
        return wanted, ""
    if platform(settings.mesh) == "cpu":
        return "waves", "on a CPU they are as fast as its matrix products"
    try:
        page_attention(settings)
    except InputError as error:
        return "waves", str(error)
    return "waves", "no device has run slots yet; rollout.engine=slots tries them"


def page_attention(settings: EngineSettings) -> AttendPages:
    """Attention to pages for the devices of the mesh.

    Raises:
        InputError: as `build_engine`.
    """
    device, size, length = platform(settings.mesh), settings.arch.head_dim, settings.chunk_length
    if device == "cpu":
        return attend_gathered
    if device == "tpu":
        fits, needed = size % 64 == 0 and length % 16 == 0, "multiples of 64 and 16"
    else:
        fits = all(number >= 16 and number.bit_count() == 1 for number in (size, length))
        needed = "powers of two from 16 on"
    if not fits:
        raise InputError(
            f"rollout.engine=slots needs a head size and a rollout.decode_chunk_length that are {needed} on a "
            f"{device.upper()}, not {size} and {length}: set rollout.decode_chunk_length=32 or rollout.engine=waves"
        )
    return paged_attention_tpu.attend if device == "tpu" else paged_attention_gpu.attend
