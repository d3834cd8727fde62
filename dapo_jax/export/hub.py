"""Host: an exported model on the Hugging Face hub: its README.md (origin, training, metrics), and the upload."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dapo_jax.config.sections import AlgorithmConfig
from dapo_jax.errors import InputError
from dapo_jax.hub.names import model_name
from dapo_jax.monitor.records import read_metrics
from dapo_jax.monitor.statistics import HELD_OUT
from dapo_jax.run.other_runs import RANDOM, first_model

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LOG_IN = "log in by `hf auth login` or set HF_TOKEN, with a token that may write"
TAGS = ("dapo", "reinforcement-learning", "dapo_jax")
OPTIONS = (  # that say how it was trained; none is a path on this machine
    *(
        "algorithm.adv_estimator",
        "algorithm.filter_groups.enable",
        "actor.policy_loss.loss_mode",
        "actor.loss_agg_mode",
    ),
    *("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.optim.lr", "model.lora.rank"),
    *("data.train_batch_size", "rollout.n", "actor.ppo_mini_batch_size", "data.max_response_length", "seed"),
)


def model_card(options: Mapping[str, Any], step: int, *, adapter: bool, images: bool = False) -> str:
    """The text of README.md for the policy after training step `step`.

    Args:
        options: of its run, by dotted key.
        adapter: it goes with PEFT's adapters instead of a whole model.
        images: the model also takes images.
    """
    workdir, model = options["workdir"], first_model(options["model.path"])
    name = model_name(model)
    task = "image-text-to-text" if images else "text-generation"
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": task}
    if name is not None:
        head["base_model"] = name.repository
    base = name.repository if name else "a random model" if model == RANDOM else Path(model).name
    lines = [
        "---",
        yaml.safe_dump(head | {"tags": [*TAGS]}, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {Path(workdir).name}",
        "",
        f"{'Adapters for ' * adapter}{base} after {step} training steps of DAPO (arXiv:2503.14476) by dapo_jax.",
        "",
        *_table("option", [(key, str(options[key])) for key in OPTIONS]),
    ]
    measured = _measured(workdir, step)
    if measured:
        lines += ["", *_table("metric at this step", [(key, f"{value:.4f}") for key, value in measured.items()])]
    return "\n".join(lines) + "\n"


def recipe(algorithm: AlgorithmConfig, loss: str) -> str:
    """The algorithm in a few words."""
    filters = "with" if algorithm.filter_groups.enable else "without"
    return f"{algorithm.adv_estimator}, loss {loss}, {filters} dynamic sampling"


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {title} | |", "| --- | --- |", *(f"| `{key}` | {value} |" for key, value in rows)]


def _measured(workdir: str, step: int) -> dict[str, float]:
    """Held-out accuracies of the step in the run's metrics; {} without any."""
    try:
        rows = read_metrics(workdir)
    except (OSError, RuntimeError):  # moved, in a bucket, or damaged: the export does not depend on it
        return {}
    row = next((row for row in reversed(rows) if row.get("step") == step), {})
    return {key: value for key, value in row.items() if HELD_OUT.fullmatch(key)}


def check_upload(repository: str) -> None:
    """Raises InputError if nothing can be uploaded: no OWNER/NAME, no token. Does not contact the hub."""
    if not _NAME.fullmatch(repository):
        raise InputError(f"--push-to-hub={repository} must be OWNER/NAME of the Hugging Face hub: correct it")
    from huggingface_hub import get_token

    if not get_token():
        raise InputError(f"--push-to-hub={repository} needs a token of the Hugging Face hub: {_LOG_IN}")


def upload(directory: Path, repository: str, *, private: bool, message: str) -> str:
    """Makes the repository if need be, commits the files of `directory` to it, and returns its address.

    Args:
        private: of a new repository; one that exists stays as it is.
        message: of the commit.

    Raises:
        InputError: the token may not write there.
        RuntimeError: the hub cannot be reached, or refuses. The directory stays.
    """
    from huggingface_hub import HfApi, constants

    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message=message)
    except Exception as error:  # the library's own, those of its HTTP client and the system's have no common class
        by_hand = f"the directory {directory} is complete: upload it by `hf upload {repository} {directory}`"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
            raise InputError(f"--push-to-hub={repository} is refused ({reason}): {_LOG_IN}; {by_hand}") from error
        raise RuntimeError(
            f"{repository} cannot be uploaded to {constants.ENDPOINT} ({reason}): check the network and "
            f"HF_HUB_OFFLINE; {by_hand}"
        ) from error
    return str(address)
