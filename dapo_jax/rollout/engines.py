"""Host: which rollout engine a run has, and why."""

import logging
from collections.abc import Callable

from dapo_jax.errors import InputError
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import AttendPages, attend_gathered
from dapo_jax.parallel.mesh import platform
from dapo_jax.rollout.engine import RolloutEngine
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.slots import SlotEngine
from dapo_jax.rollout.waves import WaveEngine

logger = logging.getLogger(__name__)


def build_engine(wanted: str, settings: EngineSettings, check: Callable[[], None] = lambda: None) -> RolloutEngine:
    """The engine of rollout.engine, "waves", "slots" or "auto".

    Args:
        check: called before each chunk; may raise to end the sampling.

    Raises:
        InputError: the devices' kernel for slots does not take the model or the chunk length.
    """
    if wanted == "slots":
        logger.info("rollout.engine=slots: responses are decoded in slots and pages")
        return SlotEngine(settings, page_attention(settings), check)
    reason = "" if wanted == "waves" else " (auto: no device has run slots yet; rollout.engine=slots tries them)"
    logger.info("rollout.engine=waves: responses are decoded in waves%s", reason)
    return WaveEngine(settings, check)


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
