from pathlib import Path

import pytest

from dapo_jax.command_line import read_config

TINY = str(Path(__file__).parents[1] / "configs" / "tiny.py")


def test_overrides_reach_the_config():
    config = read_config(["train", "--config", TINY, "--config.actor.optim.lr=2e-6", "--config.data.gen_batch_size=4"])
    assert config.actor.optim.lr == 2e-6 and config.data.gen_batch_size == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.unknown=1"], "unknown"),
        (["--config.actor.clip_ratio_lo=0.1"], "clip_ratio_low"),
        (["--config.actor.optim.lr=fast"], "lr"),
        (["--confg.seed=1"], "confg"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_argument_is_refused_and_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        read_config(["train", "--config", TINY, *arguments])


def test_a_missing_config_is_refused():
    with pytest.raises(ValueError, match="--config is missing"):
        read_config(["train"])
    with pytest.raises(ValueError, match="nowhere.py"):
        read_config(["train", "--config", "nowhere.py"])
