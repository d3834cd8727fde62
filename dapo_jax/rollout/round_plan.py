"""Host: what an engine compiles and calls in one generation round, as the preflight sees it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from dapo_jax.data.work import Work
from dapo_jax.rollout.sampling import Sampling

ANY_SAMPLING = Sampling.create(1.0, 1.0, -1)  # its values are traced: any other lowers to the same program


@dataclass(frozen=True)
class RoundProgram:
    """A compiled function of the engine."""

    stage: str  # "prefill" or "decode"
    name: str
    calls: float  # per round
    lower: Callable[[], jax.stages.Lowered]  # call it under `jax.set_mesh`
    cache: Any  # shapes of the keys and values that the call takes and returns
    other_cache: Any = ()  # shapes of those that are in memory meanwhile
    reads_weights: bool = True  # the decoding weights are an argument
    family: str = ""  # the costs of programs of one family are linear in `features`; "" = not known
    features: tuple[float, ...] = ()
    pairs: float | None = None  # keys that a kernel of attention reads for all rows of a device; None = no kernel


@dataclass(frozen=True)
class RoundPlan:
    """The programs of one generation round."""

    programs: list[RoundProgram]
    rows: int  # decoded at once, on all devices
    sizes: Mapping[str, int]  # for a report
    work: Mapping[str, Work]  # computed and needed, by stage
