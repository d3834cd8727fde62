"""DAPO for language models, native to JAX.

`import dapo_jax as dx` offers the names of `__all__`, which docs/api.md describes; they are loaded when they are used.
Everything else in the package may change from one version to the next.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dapo_jax.config.files import recipes as recipes
    from dapo_jax.config.values import default_config as default_config
    from dapo_jax.errors import InputError as InputError
    from dapo_jax.interface.algorithms import group_advantages as group_advantages
    from dapo_jax.interface.algorithms import keep_groups as keep_groups
    from dapo_jax.interface.algorithms import policy_loss as policy_loss
    from dapo_jax.interface.configs import load_config as load_config
    from dapo_jax.interface.policy import Policy as Policy
    from dapo_jax.interface.samples import Samples as Samples
    from dapo_jax.interface.training import TrainResult as TrainResult
    from dapo_jax.interface.training import train as train
    from dapo_jax.tools.plot import live_curves as live_curves
    from dapo_jax.tools.replay import replay as replay

__version__ = "0.1.0"
_MODULES = {  # name: its module
    "default_config": "config.values",
    "load_config": "interface.configs",
    "recipes": "config.files",
    "train": "interface.training",
    "TrainResult": "interface.training",
    "live_curves": "tools.plot",
    "replay": "tools.replay",
    "Policy": "interface.policy",
    "Samples": "interface.samples",
    "keep_groups": "interface.algorithms",
    "group_advantages": "interface.algorithms",
    "policy_loss": "interface.algorithms",
    "InputError": "errors",
}
__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dapo_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dapo_jax.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
