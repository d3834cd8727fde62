"""Host: which networks are trained, and what an estimator asks of them."""

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.config.sections import AlgorithmConfig, Config

FOR_ESTIMATORS = "logprobs", "entropy", "sum_pi_squared"  # statistics of tokens that an estimator may need


def uses_critic(config: Config) -> bool:
    """Whether the advantage estimator needs a value function."""
    return needs(named_estimator(config.algorithm.adv_estimator), "values")


def needs_statistics(algorithm: AlgorithmConfig) -> bool:
    """Whether something needs the statistics of each token under the policy before the update."""
    estimator = named_estimator(algorithm.adv_estimator)
    return algorithm.top_entropy_quantile < 1 or any(needs(estimator, name) for name in FOR_ESTIMATORS)


def trained(config: Config) -> tuple[str, ...]:
    """The sections of the models that are trained."""
    return ("actor", "critic") if uses_critic(config) else ("actor",)
