"""Host: what is looked at between reading the data and the first step, and would otherwise be found out late."""

import logging
from collections.abc import Mapping, Sequence

from dapo_jax.config.derived import gen_batch_size
from dapo_jax.config.sections import Config
from dapo_jax.data.experience import OWN_SCORES, check_score_names
from dapo_jax.data.prompts import PromptSet
from dapo_jax.data.rows import PromptRow, prompt_identity
from dapo_jax.errors import InputError
from dapo_jax.problems import TaskSet
from dapo_jax.rewards.ground_truths import check_ground_truths
from dapo_jax.rewards.trial import try_function
from dapo_jax.rewards.verifiers import VERIFIERS
from dapo_jax.rewards.worker_pool import Verdict, VerifierPool

logger = logging.getLogger(__name__)


def check_rewards(
    config: Config,
    train_set: PromptSet,
    task_sets: Sequence[TaskSet],
    function: str,
    verifiers: Mapping[str, VerifierPool],
) -> None:
    """Asks each function about its rows: a built-in verifier about all ground truths, one of the user's about one row.

    Args:
        train_set: empty where nothing is trained.
        function: judges the responses to `train_set`.
        verifiers: by the name of their function.

    Raises:
        ValueError: ground truths that no response can match, or a function that cannot work.
    """
    sets = [(train_set.rows, function), *((task.prompts.rows, task.options.reward_function) for task in task_sets)]
    tried = set()  # what a function says of one data source is the same in every set
    for rows, name in sets:
        check_ground_truths(rows, name, verifiers[name])
        if name in VERIFIERS or not rows or (name, rows[0].data_source) in tried:
            continue
        tried.add((name, rows[0].data_source))
        for verdict in try_function(rows[0], name, verifiers[name]):
            check_score_names(verdict.numbers)
            if rows is train_set.rows and config.algorithm.filter_groups.enable:
                _check_metric(config.algorithm.filter_groups.metric, name, rows[0], verdict)


def _check_metric(metric: str, name: str, row: PromptRow, verdict: Verdict) -> None:
    if metric not in (*OWN_SCORES, *verdict.numbers):
        raise InputError(
            f"algorithm.filter_groups.metric={metric!r} is not among the numbers that reward.function={name!r} returns "
            f"for {row.origin}, {', '.join(verdict.numbers)}: choose one of these, or return it for every response"
        )


def warn_of_data(config: Config, train_set: PromptSet, task_sets: Sequence[TaskSet]) -> None:
    """Warns of fewer prompts than a batch takes, and of problems to evaluate on that are trained on."""
    most = max(config.data.train_batch_size, gen_batch_size(config))
    if 0 < len(train_set) < most:
        option = "train_batch_size" if config.data.train_batch_size == most else "gen_batch_size"
        logger.warning(
            "%d problems to train on, fewer than data.%s=%d: prompts repeat within a batch; lower it or give more",
            len(train_set),
            option,
            most,
        )
    trained = {prompt_identity(row.prompt) for row in train_set.rows} if task_sets else set()
    for task in task_sets:
        shared = sum(prompt_identity(row.prompt) in trained for row in task.prompts.rows)
        if shared:
            logger.warning(
                "%d of %d prompts of %s are also trained on: their accuracy is no measure of new problems; "
                "take them out of one of the two",
                shared,
                len(task.prompts),
                f"evaluate.tasks, {task.options.name!r}" if task.options.name else "data.val_files",
            )
