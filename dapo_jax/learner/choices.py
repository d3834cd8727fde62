"""Host: which networks are trained."""

from dapo_jax.algorithms.advantages import ESTIMATORS
from dapo_jax.algorithms.arguments import needs
from dapo_jax.config.sections import Config


def uses_critic(config: Config) -> bool:
    """Whether the advantage estimator needs a value function."""
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)  # None: validation refuses the name
    return estimator is not None and needs(estimator, "values")


def trained(config: Config) -> tuple[str, ...]:
    """The sections of the models that are trained."""
    return ("actor", "critic") if uses_critic(config) else ("actor",)
