"""The options of a run. A config file changes what `default_config()` returns."""

from dapo_jax.config.sections import Config
from dapo_jax.config.values import default_config

__all__ = ["Config", "default_config"]
