"""Host: the networks that are trained, how each is updated on a batch, and what an estimator asks of them."""

from dataclasses import dataclass

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.config.sections import ActorConfig, AlgorithmConfig, Config, CriticConfig

FOR_ESTIMATORS = "logprobs", "entropy", "sum_pi_squared"  # statistics of tokens that an estimator may need


@dataclass(frozen=True)
class Network:
    """How a network is updated on a batch: its section, with what a critic takes from the actor's."""

    options: ActorConfig | CriticConfig
    mini_batch_size: int  # prompts per optimizer step
    mini_batch_rows: int  # responses per optimizer step
    micro_batch_size: int  # responses per forward and backward pass on one device
    packs: bool  # a pass has as many responses as its tokens allow; else one padded row for each
    max_tokens: int  # of a packed pass on one device
    loss_scale_factor: float
    count_empty_sequences: bool  # sequence means count rows without a token too


def uses_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator needs a value function."""
    return needs(named_estimator(algorithm.adv_estimator), "values")


def needs_statistics(algorithm: AlgorithmConfig) -> bool:
    """Whether something needs the statistics of each token under the policy before the update."""
    estimator = named_estimator(algorithm.adv_estimator)
    return algorithm.top_entropy_quantile < 1 or any(needs(estimator, name) for name in FOR_ESTIMATORS)


def trained(config: Config) -> dict[str, Network]:
    """The networks that are trained, by the name of their section."""
    actor, longest = config.actor, config.data.max_prompt_length + config.data.max_response_length

    def network(options: ActorConfig | CriticConfig) -> Network:
        mini = options.ppo_mini_batch_size or actor.ppo_mini_batch_size
        micro = options.ppo_micro_batch_size_per_device or actor.ppo_micro_batch_size_per_device
        return Network(
            options=options,
            mini_batch_size=mini,
            mini_batch_rows=mini * config.rollout.n,
            micro_batch_size=micro,
            packs=actor.use_dynamic_bsz,
            max_tokens=actor.ppo_max_token_len_per_device or micro * longest,
            loss_scale_factor=actor.loss_scale_factor or float(config.data.max_response_length),
            count_empty_sequences=actor.count_empty_sequences,
        )

    sections = {"actor": actor, "critic": config.critic} if uses_critic(config.algorithm) else {"actor": actor}
    return {name: network(options) for name, options in sections.items()}
