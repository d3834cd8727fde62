"""Host: a whole training run from a program, and its records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_jax.command.command_line import processes_of
from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.config.places import copy_of, is_address, place_of
from dapo_jax.config.sections import Config
from dapo_jax.config.values import with_values
from dapo_jax.export.export import export
from dapo_jax.interface.configs import AnyConfig, with_changes
from dapo_jax.interface.environments import Environment, Tool, with_environment
from dapo_jax.interface.policy import Policy
from dapo_jax.interface.rewards import Reward, reward_options
from dapo_jax.interface.rows import Rows, with_rows
from dapo_jax.interface.sizes import config_of_model, names_model, with_sizes
from dapo_jax.monitor.mirror import KIND
from dapo_jax.monitor.records import OnStep, read_metrics, unheard
from dapo_jax.parallel.memory import reserve_gpu_memory
from dapo_jax.parallel.stopping import Stopped
from dapo_jax.training import loop as training


@dataclass(frozen=True)
class TrainResult:
    """A run that has ended, or was stopped: its work directory and what is in there."""

    config: Config
    stopped: str = ""  # why it ended early; "" = it did not

    @property
    def workdir(self) -> Any:
        """Where checkpoints, metrics and samples are: a path, or the place of an address."""
        given = self.config.workdir
        return place_of(given) if is_address(given) else Path(given)

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dict per training step: "step", and each metric of docs/metrics.md by its name."""
        address = self.config.workdir
        return read_metrics(copy_of(address, KIND) if is_address(address) else address)

    def policy(self) -> Policy:
        """The trained policy, to sample from or to train on. Close it, or use it in `with`."""
        trained = with_values(self.config, {"model.path": self.config.workdir})
        return Policy(without_switched_off(self.config, trained, ()))

    def export(
        self, directory: str | Path, *, dtype: str = "bfloat16", adapter: bool = False, keep_vision: bool = False
    ) -> None:
        """Writes the newest checkpoint as a Hugging Face model directory, as `dapo-jax export` does.

        Args:
            directory: new or empty; it appears only when it is complete.
            dtype: of the weights, bfloat16 or float32.
            adapter: only the adapters of config.model.lora, for PEFT.
            keep_vision: the whole model that the text part is from, with that part replaced.
        """
        export(self.config, directory, dtype=dtype, adapter=adapter, keep_vision=keep_vision)


def train(
    config: AnyConfig,
    reward: Reward | None = None,
    *,
    environment: Environment | None = None,
    tools: Sequence[Tool] | None = None,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    on_step: OnStep = unheard,
    **options: Any,
) -> TrainResult:
    """Trains as `dapo-jax train` does; a run that was stopped resumes from its newest checkpoint.

        result = dx.train(dx.load_config("tiny", {"workdir": "runs/mine"}))
        result.records[-1]["rollout/acc/mean"]
        dx.train("Qwen/Qwen2.5-0.5B-Instruct", data=rows, reward=f, workdir="runs/mine", **{"actor.optim.lr": 2e-6})

    An interrupt (Ctrl-C, or a notebook's stop button) saves a checkpoint and returns. A run whose data is solved ends
    before its last step (docs/dynamic_sampling.md).

    Args:
        config: in any form that `load_config` or `default_config` gives, or a recipe's name. Or a model: a directory,
            an address or a name on the hub. Then mesh, batch sizes and lengths that are not given are chosen for the
            model, the data and the devices that are there, and printed.
        reward: instead of the config's: a function of the response's text, which may also take the ground truth, or in
            another form of docs/rewards.md, and returns a number or a dict with "score"; or several
            by name with their weights, {"correct": (function, 1.0), "short": (other, 0.1)}, whose weighted sum is the
            score, while the first alone gives `acc`; or a list of them. Functions run in worker processes, with limits
            of time and memory: one that no module has, such as a lambda or one of a notebook, is sent there with what
            it uses.
        environment: a class whose instances answer the policy's turns, or its name (docs/environments.md): with `reset`
            and `step`, or with `reset` and public methods that the policy calls as tools. Or several by the names that
            rows have in their column `environment`.
        tools: functions that it calls, without state; `reward` reads the whole chat unless the environment gives
            rewards.
        data: rows to train on, instead of the config's: dicts of columns, a DataFrame or a datasets.Dataset, which are
            written to the work directory; or the path of a prompt file. data.prompt_template, prompt_key and answer_key
            say which column is what. Rerun with the same rows to resume: others are refused.
        eval_data: rows to evaluate on, in the same way.
        on_step: called with each step (0 = before training) and its metrics, in the first process, when they are in
            metrics.jsonl. What it raises ends the run.
        options: values by dotted key; workdir is runs/NAME for a model unless given.

    Raises:
        InputError: the config, the model, the data or the devices do not fit together.
        RuntimeError: the run cannot continue, for example because too few groups pass the filter.
    """
    of_model = isinstance(config, str) and names_model(config)
    frozen = base = with_changes(config_of_model(str(config)) if of_model else config, options)
    if data is not None or eval_data is not None:
        frozen = with_rows(frozen, data, eval_data)
    if reward is not None:
        frozen = with_values(frozen, reward_options(reward))
    frozen = without_switched_off(base, with_environment(frozen, environment, tools), options)
    reserve_gpu_memory(frozen.trainer.gpu_memory_fraction)
    with processes_of(frozen.trainer):
        try:
            frozen = with_sizes(frozen, options) if of_model else frozen
            training.train(frozen, on_step=on_step)
        except Stopped as reason:
            return TrainResult(frozen, str(reason))
    return TrainResult(frozen)
