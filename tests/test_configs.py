import ast
import dataclasses
import functools
from pathlib import Path

import pytest
import yaml
from jax.sharding import AbstractMesh

from dapo_jax.command.option_uses import without_switched_off
from dapo_jax.command.validation import validate
from dapo_jax.command.warnings import warnings
from dapo_jax.config.files import read_config_file
from dapo_jax.config.sections import Config
from dapo_jax.config.values import flat, freeze, with_values
from dapo_jax.learner.trained_networks import trained
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.weights import count_params, weight_table
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, indivisible_weights
from dapo_jax.run.meshes import batch_problems

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
PUBLISHED = yaml.safe_load((Path(__file__).parent / "published_recipes.yaml").read_text())["recipes"]
LARGE = {  # the model in configs/shapes, and devices
    "dapo_qwen2.5_7b_math": ("Qwen2.5-7B", 8),
    "dapo_qwen2.5_32b_math": ("Qwen2.5-32B", 128),
    "dapo_qwen2.5_7b": ("Qwen2.5-7B", 8),
    "entropy_clip_cov": ("Qwen2.5-7B", 8),
    "entropy_kl_cov": ("Qwen2.5-7B", 8),
    "cpo": ("Qwen3-4B-Base", 8),
    "qwen3_30b_a3b_math": ("Qwen3-30B-A3B", 64),
    "qwen3.5_35b_a3b_math": ("Qwen3.5-35B-A3B", 16),
    "gpt_oss_20b_math": ("gpt-oss-20b", 16),
    "smollm3_3b_math": ("SmolLM3-3B", 8),
    "gemma3_1b_gsm8k_lora": ("gemma-3-1b-it", 8),
}


@functools.cache
def shape(name: str) -> Architecture:
    return read_architecture(ROOT / "configs" / "shapes" / name)


@functools.cache
def load(name: str) -> Config:
    return freeze(read_config_file(str(ROOT / "configs" / f"{name}.py")))


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_is_valid_and_has_no_warning(path):
    config = load(path.stem)
    validate(config)
    assert warnings(config) == []
    assert config.workdir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_goes_without_the_group_filter_with_one_option(path):
    option = "algorithm.filter_groups.enable"  # with_values and without_switched_off: as on the command line
    config = without_switched_off(load(path.stem), with_values(load(path.stem), {option: False}), [option])
    validate(config)
    assert not config.algorithm.filter_groups.enable


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_its_command_hardware_and_result(path):
    text, script = docstring(path), ROOT / "scripts" / f"{path.stem}.sh"
    if script.exists():
        assert f"bash scripts/{script.name}" in text and f"--config {path.stem}" in script.read_text()
        assert f"dapo-jax train --config {path.stem}" in text
    else:
        assert f"python -m dapo_jax.train --config configs/{path.name}" in text
    assert "Hardware: " in text
    assert any(statement in text for statement in ("Expect: ", "Only two steps were run", "Published: "))


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_values(name):
    values = flat(load(name))
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    assert {key: found[key] for key in PUBLISHED[name]} == PUBLISHED[name]


def test_the_critic_of_ppo_warms_up():
    assert load("ppo_critic").trainer.critic_warmup > 0


def test_gemma_trains_adapters_on_the_task_of_gsm8k():
    gemma, gsm8k = load("gemma3_1b_gsm8k_lora"), load("gsm8k")
    assert gemma.model.lora.rank > 0 and gemma.mesh == gsm8k.mesh
    assert (gemma.evaluate, gemma.rollout) == (gsm8k.evaluate, gsm8k.rollout)
    files = {"train_files": gsm8k.data.train_files, "val_files": gsm8k.data.val_files}
    assert dataclasses.replace(gemma.data, **files) == gsm8k.data
    assert (gemma.actor.optim.lr, gsm8k.actor.optim.lr) == (1e-5, 1e-6)


def test_small_recipes_share_the_quickstart_task():
    quickstart = load("quickstart")
    for name in ("grpo", "ppo_critic"):
        config = load(name)
        assert config.model == quickstart.model and config.data.arithmetic == quickstart.data.arithmetic
        assert config.data.system_prompt == quickstart.data.system_prompt
        assert config.evaluate == quickstart.evaluate


@pytest.mark.parametrize("name", LARGE)
def test_models_and_micro_batches_fit_the_mesh_of_large_recipes(name):
    config, arch, num_devices = load(name), shape(LARGE[name][0]), LARGE[name][1]
    assert f"Hardware: {num_devices} devices" in docstring(ROOT / "configs" / f"{name}.py")
    fsdp, expert, tensor = config.mesh.fsdp, config.mesh.expert, config.mesh.tensor
    assert config.mesh.data == -1 and num_devices % (fsdp * expert * tensor) == 0
    data = num_devices // (fsdp * expert * tensor)
    mesh = AbstractMesh((data, fsdp, expert, tensor), ("data", "fsdp", "expert", "tensor"))
    for rules in (TRAIN_RULES, DECODE_RULES):
        assert indivisible_weights(weight_table(arch), dict(mesh.shape), rules) == []
    assert batch_problems(trained(config), config.data.train_batch_size, mesh) == []


def test_shapes_are_those_of_the_models():
    counts = {
        "Qwen2.5-7B": 7_615_616_512,
        "Qwen2.5-32B": 32_763_876_352,
        "Qwen3-30B-A3B": 30_532_122_624,
        "gpt-oss-20b": 20_914_757_184,
        "gpt-oss-120b": 116_829_156_672,
        "SmolLM3-3B": 3_075_098_624,
        "gemma-3-1b-it": 999_885_952,
        "Qwen3.5-0.8B": 752_393_024,
        "Qwen3.5-35B-A3B": 34_660_610_688,
    }
    assert {name: count_params(shape(name)) for name in counts} == counts
    gemma = shape("gemma-3-1b-it")
    assert [kind.window for kind in gemma.layers].count(None) == 4 and gemma.window == 512
    assert [kind.rotary for kind in shape("SmolLM3-3B").layers].count(False) == 9
    assert all(kind.experts for kind in shape("Qwen3-30B-A3B").layers)
