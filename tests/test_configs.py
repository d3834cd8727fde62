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
from dapo_jax.config.values import freeze, with_values
from dapo_jax.meshes import check_mesh
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.weights import count_params, weight_table
from dapo_jax.parallel.mesh import AXES
from dapo_jax.parallel.sharding import DECODE_RULES, TRAIN_RULES, indivisible_weights

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs").glob("*.py"))
DAPO_7B, DAPO_32B, DAPO_SHORT = "dapo_qwen2.5_7b_math", "dapo_qwen2.5_32b_math", "dapo_qwen2.5_7b"
CPO = "cpo"
DAPO_30B, SMOLLM3, GEMMA3 = "qwen3_30b_a3b_math", "smollm3_3b_math", "gemma3_1b_gsm8k_lora"
PUBLISHED = yaml.safe_load((Path(__file__).parent / "published_recipes.yaml").read_text())["recipes"]
CLIP_COV, KL_COV = "entropy_clip_cov", "entropy_kl_cov"

QWEN_7B, QWEN_32B, QWEN3_4B, QWEN3_30B, SMOLLM3_3B, GEMMA3_1B = (
    read_architecture(ROOT / "configs" / "shapes" / name)
    for name in ("Qwen2.5-7B", "Qwen2.5-32B", "Qwen3-4B-Base", "Qwen3-30B-A3B", "SmolLM3-3B", "gemma-3-1b-it")
)
LARGE = [
    (DAPO_7B, QWEN_7B, 8),
    (DAPO_32B, QWEN_32B, 128),
    (DAPO_SHORT, QWEN_7B, 8),
    (CLIP_COV, QWEN_7B, 8),
    (KL_COV, QWEN_7B, 8),
    (CPO, QWEN3_4B, 8),
    (DAPO_30B, QWEN3_30B, 64),
    (SMOLLM3, SMOLLM3_3B, 8),
    (GEMMA3, GEMMA3_1B, 8),
]


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


def published(config: Config) -> dict[str, object]:
    """What verl's scripts state, under their names."""
    actor, groups, overlong = config.actor, config.algorithm.filter_groups, config.reward.overlong_buffer
    return {
        "train_batch_size": config.data.train_batch_size,
        "gen_batch_size": config.data.gen_batch_size,
        "n": config.rollout.n,
        "ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "ppo_epochs": actor.ppo_epochs,
        "adv_estimator": config.algorithm.adv_estimator,
        "norm_adv_by_std": config.algorithm.norm_adv_by_std_in_grpo,
        "loss_mode": actor.policy_loss.loss_mode,
        "loss_agg_mode": actor.loss_agg_mode,
        "kl": (config.algorithm.use_kl_in_reward, actor.use_kl_loss),
        "entropy_coeff": actor.entropy_coeff,
        "lr": (actor.optim.lr, actor.optim.lr_scheduler_type, actor.optim.lr_warmup_steps),
        "weight_decay": actor.optim.weight_decay,
        "betas": actor.optim.betas,
        "grad_clip": actor.grad_clip,
        "clip": (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c),
        "max_lengths": (config.data.max_prompt_length, config.data.max_response_length),
        "truncation": config.data.truncation,
        "overlong": (overlong.len, overlong.penalty_factor) if overlong.enable else None,
        "filter": (groups.metric, groups.max_num_gen_batches) if groups.enable else None,
        "sampling": (config.rollout.temperature, config.rollout.top_p, config.rollout.top_k),
        "validation": (config.evaluate.temperature, config.evaluate.top_p, config.evaluate.n),
        "test_freq": config.trainer.test_freq,
        "save_freq": config.trainer.save_freq,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_large_recipes_have_the_published_values(name):
    values = published(load(name))
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    assert {key: found[key] for key in PUBLISHED[name]} == PUBLISHED[name]
    assert found.keys() - PUBLISHED[name].keys() <= {"clip"}  # of which one script says nothing


@pytest.mark.parametrize("name", [DAPO_7B, DAPO_32B, DAPO_30B, DAPO_SHORT])
def test_dapo_trains_as_long_as_published(name):
    config = load(name)
    updates = config.data.train_batch_size // config.actor.ppo_mini_batch_size
    assert updates == 16
    steps = config.trainer.total_training_steps
    assert steps * updates == 5280 if name in (DAPO_32B, DAPO_30B) else steps == 200


def test_recipes_have_the_published_losses():
    cpo, clip_cov, kl_cov = load(CPO), load(CLIP_COV).actor.policy_loss, load(KL_COV).actor.policy_loss
    assert (cpo.algorithm.cpo.wrap_method, cpo.actor.kl_loss_type, cpo.actor.kl_loss_coef) == (
        *("seq_kl", "low_var_kl", 0.001),
    )
    assert (cpo.trainer.total_epochs, cpo.trainer.total_training_steps) == (20, -1)
    assert (clip_cov.clip_cov_ratio, clip_cov.clip_cov_lb, clip_cov.clip_cov_ub) == (0.0002, 1.0, 5.0)
    assert (kl_cov.kl_cov_ratio, kl_cov.ppo_kl_coef) == (0.002, 1.0)


def test_grpo_and_ppo_are_the_plain_algorithms():
    grpo, ppo = load("grpo"), load("ppo_critic")
    for config in (grpo, ppo):
        assert published(config)["filter"] is None and published(config)["clip"] == (0.2, 0.2, 3.0)
    assert grpo.algorithm.adv_estimator == "grpo" and grpo.actor.loss_agg_mode == "seq-mean-token-mean"
    actor = grpo.actor
    assert (actor.use_kl_loss, actor.kl_loss_type, actor.kl_loss_coef) == (True, "low_var_kl", 0.001)
    assert ppo.algorithm.adv_estimator == "gae" and (ppo.algorithm.gamma, ppo.algorithm.lam) == (1.0, 1.0)
    assert ppo.critic.cliprange_value == 0.5 and ppo.trainer.critic_warmup > 0


def test_gemma_trains_adapters_on_the_task_of_gsm8k():
    gemma, gsm8k = load(GEMMA3), load("gsm8k")
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


@pytest.mark.parametrize(("name", "arch", "num_devices"), LARGE, ids=[name for name, _, _ in LARGE])
def test_models_and_micro_batches_fit_the_mesh_of_large_recipes(name, arch, num_devices):
    config = load(name)
    assert f"Hardware: {num_devices} devices" in docstring(ROOT / "configs" / f"{name}.py")
    fsdp, tensor = config.mesh.fsdp, config.mesh.tensor
    assert config.mesh.data == -1 and num_devices % (fsdp * tensor) == 0
    mesh = AbstractMesh((num_devices // (fsdp * tensor), fsdp, tensor), AXES)
    for rules in (TRAIN_RULES, DECODE_RULES):
        assert indivisible_weights(weight_table(arch), dict(mesh.shape), rules) == []
    check_mesh(config, arch, mesh)


def test_shapes_are_those_of_the_models():
    assert count_params(QWEN_7B) == 7_615_616_512
    assert count_params(QWEN_32B) == 32_763_876_352
    assert count_params(QWEN3_30B) == 30_532_122_624
    assert count_params(SMOLLM3_3B) == 3_075_098_624
    assert count_params(GEMMA3_1B) == 999_885_952
    assert [kind.window for kind in GEMMA3_1B.layers].count(None) == 4 and GEMMA3_1B.window == 512
    assert [kind.rotary for kind in SMOLLM3_3B.layers].count(False) == 9
    assert all(kind.experts for kind in QWEN3_30B.layers)
