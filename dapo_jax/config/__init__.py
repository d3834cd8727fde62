"""The options of a run. A config file changes what `default_config()` returns.

Both names are loaded when they are read: verifier processes import modules of this folder, but not JAX.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dapo_jax.config.sections import Config as Config
    from dapo_jax.config.values import default_config as default_config


def __getattr__(name: str) -> Any:
    if name not in ("Config", "default_config"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dapo_jax.config import sections, values

    return sections.Config if name == "Config" else values.default_config
