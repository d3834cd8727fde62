"""Host: a policy for loops of your own: it samples, computes log-probabilities, and learns from rewards."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from dapo_jax.algorithms.arguments import needs
from dapo_jax.algorithms.named import named_estimator
from dapo_jax.command.output_directory import new_output
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config, EnvironmentConfig, FilterGroupsConfig, RewardConfig
from dapo_jax.config.values import with_values
from dapo_jax.data.experience import Experience
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow
from dapo_jax.environments.episodes import told
from dapo_jax.errors import InputError
from dapo_jax.export.export import whole_model, write_policy
from dapo_jax.interface.configs import AnyConfig, as_config
from dapo_jax.interface.environments import Environment, Tool, beginnings, listed, with_environment
from dapo_jax.interface.samples import Prompt, Samples, comparing_groups, given_advantages
from dapo_jax.learner.batch import make_batch, policy_statistics, rows_of, with_those_of_batch
from dapo_jax.learner.learner import update
from dapo_jax.learner.trained_networks import trained
from dapo_jax.monitor.monitor import Monitor
from dapo_jax.parallel.compilation import keep_compiled
from dapo_jax.parallel.memory import reserve_gpu_memory
from dapo_jax.parallel.stopping import Pace
from dapo_jax.rewards.verification import Verification, total_failure
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.run.base_models import read_policy
from dapo_jax.run.downloads import with_downloads
from dapo_jax.run.episodes import open_environments
from dapo_jax.run.meshes import make_meshes
from dapo_jax.run.networks import build_learner
from dapo_jax.run.other_runs import find_trained
from dapo_jax.run.parts import open_sampler
from dapo_jax.run.sampler import groups_of
from dapo_jax.run.settings import engine_settings, learning_rates


class Policy:
    """The policy of a config: samples with `generate`, learns with `step`.

        with dx.Policy("quickstart") as policy:
            samples = policy.generate(["2 + 2 ="], n=8)
            metrics = policy.step(samples, rewards)

    It has the model, lengths, sampling, loss, optimizer and mesh of the config; data, rewards, the environment and the
    filter are the caller's. The k-th prompt of a policy always draws with the same noise, so a program that is run
    again repeats its results. With several processes, each calls jax.distributed.initialize() first, and then all make
    the same calls.

    Args:
        config: in any form that `load_config` or `default_config` gives, or a recipe's name. config.model.path may be
            the workdir of a run: its newest checkpoint.

    Raises:
        InputError: the config, the model and the devices do not fit together.
    """

    def __init__(self, config: AnyConfig) -> None:
        given = as_config(config)
        self._environment = dataclasses.replace(given.environment, path="", tools=())  # the rest of its options
        config = _without_data(given)
        validate(config)
        _check_algorithm(config)
        reserve_gpu_memory(config.trainer.gpu_memory_fraction)
        keep_compiled(config.trainer.compilation_cache_dir)
        self.config = config = with_downloads(config, data=False)
        self.arch, self.tokenizer = read_policy(config)
        meshes = make_meshes(config, self.arch)
        monitor = Monitor.silent()
        with ExitStack() as stack, jax.set_mesh(meshes.training):
            tokenizer = self.tokenizer
            settings = engine_settings(config, self.arch, tokenizer.eos_ids, tokenizer.pad_id, meshes.sampling)
            sampler = open_sampler(settings, tokenizer, config.rollout.stop, monitor.stage)
            self._sampler = stack.enter_context(sampler)
            self._learner = build_learner(config, self.arch, tokenizer, meshes, monitor, Pace(lambda: None))
            self._models = self._learner.networks.init_models()
            self._open = stack.pop_all()
        self._closed = False
        self.steps = 0  # that it has learnt from
        self._drawn = 0  # prompts: the address of the next one's draws

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int | None = None,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_tokens: int | None = None,
        environment: Environment | None = None,
        tools: Sequence[Tool] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> Samples:
        """Samples responses, or with an environment episodes.

        Args:
            prompts: chat messages, such as [{"role": "user", "content": "2 + 2 ="}], which the model's chat template
                formats, or text, which is taken as it is.
            n: responses to each; what is None is as in config.rollout.
            temperature: 0 = the most likely token. `step` needs that of the config.
            max_tokens: of a response, at most config.data.max_response_length, the default.
            environment, tools: as in `train`; the options config.environment apply. Responses are then whole chats, and
                `Samples.scores` has what the environment gives.
            rows: of each prompt the columns that the environment's `reset` is given.

        Raises:
            RuntimeError: the environment fails in all episodes.
        """
        if self._closed:
            raise InputError("the policy has been closed, as at the end of its with block: generate before that")
        settings = self.config.rollout
        n = settings.n if n is None else n
        temperature = settings.temperature if temperature is None else temperature
        longest = self.config.data.max_response_length
        if n < 1 or temperature < 0 or (max_tokens is not None and not 1 <= max_tokens <= longest):
            raise InputError(
                f"n={n} and max_tokens={max_tokens} must be at least 1, temperature={temperature} at least 0, and "
                f"max_tokens at most data.max_response_length={longest}: correct them"
            )
        plays = environment is not None or tools is not None
        if plays and max_tokens is not None:
            raise InputError(
                f"max_tokens={max_tokens} does not go with an environment: leave it out, or set environment.max_turns"
            )
        prompts = listed(prompts)
        given = beginnings(prompts, rows, plays=plays)
        tokens = self._tokenize(prompts)
        sampling = Sampling.create(
            temperature,
            settings.top_p if top_p is None else top_p,
            settings.top_k if top_k is None else top_k,
            settings.min_response_length,
        )
        numbers = range(self._drawn, self._drawn + len(tokens))
        self._drawn += len(tokens)
        with jax.set_mesh(self._sampler.mesh):
            weights = self._learner.networks.decode_weights(self._models.actor.params)
            if plays:
                config = dataclasses.replace(self.config, environment=self._environment)
                config = with_environment(config, environment, tools)
                groups = self._episodes(config, weights, given, numbers, n, sampling)
                return Samples(prompts, groups, temperature)
            request = self._sampler.request(weights, n, TRAIN, sampling)
            limits = None if max_tokens is None else np.full(len(tokens) * n, max_tokens)
            rollout = self._sampler.engine.generate(tokens, numbers, request, limits=limits)
        responses = zip(rollout.responses, rollout.mask, strict=True)
        texts = [self.tokenizer.decode(tokens[kept].tolist()) for tokens, kept in responses]
        groups = groups_of(rollout, tokens, list(numbers), list(numbers), texts, self.steps)
        return Samples(prompts, groups, temperature)

    def _episodes(
        self,
        config: Config,
        weights: Any,
        rows: Sequence[PromptRow],
        numbers: Sequence[int],
        n: int,
        sampling: Sampling,
    ) -> Experience:
        """Episodes that begin with these rows, n to each."""
        with open_environments(config, self.tokenizer) as environments:
            assert environments is not None
            rows = told(rows, environments.pool.descriptions)
            kwargs = [row.template_kwargs for row in rows]
            tokens = self.tokenizer.encode_prompts([row.prompt for row in rows], config.data, template_kwargs=kwargs)
            sampler = dataclasses.replace(self._sampler, environments=environments)
            request = sampler.request(weights, n, TRAIN, sampling)

            def verify(chosen: Sequence[int]) -> Verification:
                return Verification(None, self.tokenizer, [rows[row] for row in chosen], n, check=lambda: None)

            prompt_set, first = PromptSet(rows, tokens), numbers[0]
            groups = sampler.sample(request, prompt_set, numbers, verify, lambda number: number - first)
        if failure := total_failure([groups.outcomes], "generate"):
            raise RuntimeError(failure)
        return dataclasses.replace(groups, versions=np.full(len(groups), self.steps))

    def logprobs(self, samples: Samples) -> np.ndarray:
        """[Q, G, R] float32 log-probabilities of the policy's tokens under it as it is now; 0 elsewhere.

        They are those at config.rollout.temperature, at which the samples must have been drawn, or greedily if it is 1.
        """
        self._check_temperature(samples, "log-probabilities are those", greedily=1.0)
        if not len(samples):
            return np.zeros(samples.logprobs.shape, np.float32)
        with jax.set_mesh(self._learner.mesh):
            rows = rows_of(samples.experience, num_groups=len(samples), pad_id=self.tokenizer.pad_id)
            found = policy_statistics(self._learner, self._models.actor.params, rows).logprobs
        found = np.where(rows.policy_mask, found, 0.0).reshape(*samples.finished.shape, -1)
        return np.pad(found, ((0, 0), (0, 0), (0, samples.mask.shape[-1] - found.shape[-1])))

    def step(
        self,
        samples: Samples,
        rewards: Any = None,
        *,
        groups: Any = None,
        advantages: Any = None,
        learning_rate: float | None = None,
    ) -> dict[str, float]:
        """Learns from rewards: advantages, and all optimizer steps of a training step (DAPO, equations 8 and 9).

        Args:
            samples: of `generate`, config.rollout.n responses to each of at most config.data.train_batch_size prompts.
            rewards: [Q, G] one number per response.
            groups: [Q, G] names: responses of equal ones are compared. None = those to one prompt.
            advantages: instead of rewards, [Q, G] of responses or [Q, G, R] of tokens.
            learning_rate: of the policy; None = the schedule of config.actor.optim, which has to have a rate above 0 in
                this step.

        Returns:
            The metrics of the step, as docs/metrics.md lists them: actor/..., critic/advantages/..., ... Where a run
            with actor.old_logprob=auto would begin to recompute log-probabilities, it goes on with the sampler's.
        """
        if not isinstance(samples, Samples):
            raise InputError(f"step takes the samples of generate, not {type(samples).__name__}: give these")
        if not len(samples):
            return {}
        if (rewards is None) == (advantages is None) or (groups is not None and rewards is None):
            raise InputError("step takes rewards, which may have groups, or advantages: give one of the two")
        learner, config = self._learner, self.config
        if groups is not None:
            learner = learner.estimating(comparing_groups(learner.batching, samples.finished.shape, groups))
        elif advantages is not None:
            advantages = np.asarray(advantages, np.float32)
            learner = learner.estimating(given_advantages(config.algorithm, samples.by_policy, advantages))
            rewards = advantages if advantages.ndim == 2 else advantages.sum(axis=-1, where=samples.by_policy)
        experience = self._rewarded(samples, rewards)
        recompute = config.actor.old_logprob == "recompute"
        networks = learner.batching.trained
        rates = learning_rates(networks, config.trainer, self.steps + 1)
        if learning_rate is not None:
            rates |= {"actor": learning_rate} if "actor" in rates else {}
        elif ended := [name for name, rate in rates.items() if rate == 0 < networks[name].options.optim.lr]:
            raise InputError(
                f"step {self.steps + 1} has a learning rate of 0, as the schedule of {' and '.join(ended)} ended with "
                f"trainer.total_training_steps={config.trainer.total_training_steps}: raise it, set "
                "optim.min_lr_ratio, or give step a learning_rate"
            )
        with jax.set_mesh(self._learner.mesh):
            batch, metrics = make_batch(learner, experience, self._models, recompute=recompute, kl_coef=0.0)
            self._models, finish = update(self._learner, self._models, batch, rates)
            found, _ = finish()
        self.steps += 1
        return with_those_of_batch(found, metrics)

    def export(
        self, directory: str | Path, *, dtype: str = "bfloat16", adapter: bool = False, keep_vision: bool = False
    ) -> None:
        """Writes the policy as a Hugging Face model directory, as `dapo-jax export` does.

        Args:
            directory: new or empty; it appears only when it is complete.
            dtype: of the weights, bfloat16 or float32.
            adapter: only the adapters of config.model.lora, for PEFT.
            keep_vision: the whole model that the text part is from, with that part replaced.
        """
        path, rank = self.config.model.path, self.config.model.lora.rank
        if adapter and not rank:
            raise InputError("adapter=True needs a policy with adapters, but model.lora.rank=0: leave it out")
        if adapter and find_trained(path) is not None:
            raise InputError(
                f"adapter=True writes adapters of this policy alone, but model.path={path} is a run with weights of "
                "its own: leave it out, or export the run's by TrainResult.export or `dapo-jax export --adapter`"
            )
        output, params, mesh = new_output(directory), self._models.actor.params, self._learner.mesh
        images_from = whole_model(path, self.arch, adapter=adapter) if keep_vision else None
        form: Any = {"dtype": dtype, "adapter": adapter, "images_from": images_from}
        write_policy(self.config, self.arch, self.tokenizer, mesh, params, output, **form)

    def close(self) -> None:
        """Ends what it does in the background; nothing can be generated afterwards."""
        self._closed = True
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        data = self.config.data
        tokens = self.tokenizer.encode_prompts(prompts, data)
        longest = max(map(len, tokens), default=0)
        if not all(tokens) or longest > data.max_prompt_length:
            raise InputError(
                f"a prompt has {longest if all(tokens) else 0} tokens, but must have from 1 to "
                f"data.max_prompt_length={data.max_prompt_length}: change the prompt, or raise that option"
            )
        return tokens

    def _check_temperature(self, samples: Samples, what: str, *, greedily: float) -> None:
        """Raises InputError for samples of another temperature than the config's; `greedily`: that of temperature 0."""
        if (samples.temperature or greedily) != self.config.rollout.temperature:
            raise InputError(
                f"the samples were drawn at temperature={samples.temperature:g}, but {what} at "
                f"rollout.temperature={self.config.rollout.temperature:g}: set that option, or give generate none"
            )

    def _rewarded(self, samples: Samples, rewards: Any) -> Experience:
        """The groups with their rewards. InputError if they do not fit the config."""
        values, shape = np.asarray(rewards, np.float32), samples.finished.shape
        most, n = self.config.data.train_batch_size, self.config.rollout.n
        if values.shape != shape:
            raise InputError(f"rewards have the shape {values.shape}, but the samples {shape}: give one per response")
        if not np.isfinite(values).all():
            raise InputError("rewards hold a number that is not finite: correct the reward")
        self._check_temperature(samples, "step learns from those", greedily=0.0)
        if shape[0] > most or shape[1] != n:
            raise InputError(
                f"{shape[0]} groups of {shape[1]} responses do not fit data.train_batch_size={most} and rollout.n={n}: "
                "change these options, or what is passed to step"
            )
        return samples.experience.with_scores(score=values, acc=values, seq_reward=values)


def _without_data(config: Config) -> Config:
    """`config` without what the caller has: prompts, rewards and the filter."""
    enable = config.algorithm.filter_groups.enable  # as it was: other options go with it
    algorithm = dataclasses.replace(config.algorithm, filter_groups=FilterGroupsConfig(enable=enable))
    config = dataclasses.replace(config, reward=RewardConfig(), environment=EnvironmentConfig(), algorithm=algorithm)
    if config.data.task == "files" and not config.data.train_files:
        return with_values(config, {"data.task": "arithmetic"})
    return config


def _check_algorithm(config: Config) -> None:
    """Raises InputError for what needs more than samples and rewards."""
    algorithm = config.algorithm
    estimator = named_estimator(algorithm.adv_estimator)
    more = any(needs(estimator, name) for name in ("hint_logprobs", "reward_baselines"))
    problems = [f"algorithm.adv_estimator={algorithm.adv_estimator}"] * more
    problems += ["algorithm.use_kl_in_reward=True"] * algorithm.use_kl_in_reward
    problems += ["trainer.rollout_ahead=1"] * bool(config.trainer.rollout_ahead)
    problems += [f"rollout.segment_length={config.rollout.segment_length}"] * bool(config.rollout.segment_length)
    cosine = [name for name, one in trained(config).items() if one.options.optim.lr_scheduler_type == "cosine"]
    if config.trainer.total_training_steps < 0:  # the caller's data have no epochs
        problems += [f"{name}.optim.lr_scheduler_type=cosine over total_training_steps=-1" for name in cosine]
    if problems:
        raise InputError(f"Policy does not support {', '.join(problems)}; use train() or another value")
