"""Whole runs of the small checkpoints of tests/models/data."""

import json
import shutil
from pathlib import Path

from dapo_jax.data.tokenizer import character_tokenizer

CHECKPOINTS = Path(__file__).parent / "models" / "data"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def with_tokenizer(name: str, folder: Path) -> str:
    """A copy of a checkpoint in `folder` with a tokenizer, as it would lie in a download."""
    directory = folder / Path(name).name
    shutil.copytree(CHECKPOINTS / name, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    character_tokenizer().backend.save(str(directory / "tokenizer.json"))
    return str(directory)


def changes_of(model: str, **changes: object) -> dict[str, object]:
    """Options of a run of two steps. Random answers are seldom right: every group is trained on."""
    return {
        "model.path": model,
        "algorithm.filter_groups.enable": False,
        "data.gen_batch_size": 4,
        "trainer.total_training_steps": 2,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        **changes,
    }
