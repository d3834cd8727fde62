"""The export command: what it writes is what the checkpoint holds, for this package and for transformers."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import smollm2_file
from models.checkpoints import tolerance
from safetensors.numpy import load_file
from shapes import mesh_of, one_device_mesh
from small_run import RECIPE, small_config

from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.sections import DataConfig, TrainerConfig
from dapo_jax.config.values import with_values
from dapo_jax.data.tokenizer import character_tokenizer, load_tokenizer
from dapo_jax.export.export import export, main
from dapo_jax.hub import smollm2
from dapo_jax.learner.actor import build_actor
from dapo_jax.learner.critic import build_critic
from dapo_jax.learner.optimizer import Models
from dapo_jax.learner.trained_networks import uses_critic
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.lora import TARGETS, present_targets
from dapo_jax.models.transformer import forward, logits, positions_of
from dapo_jax.monitor.recipe import write_config
from dapo_jax.run.base_models import read_model
from dapo_jax.run.checkpoint import Checkpoints
from dapo_jax.run.progress import Progress
from dapo_jax.run.settings import actor_settings

DATA = Path(__file__).parent / "models" / "data"
NAMES = ["llama3_rope_scaled", "llama_tied", "qwen2_bias_tied", "qwen3_qknorm"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
TEXTS = ["12 + 7 =\n", "what, a b?  c", "", "<eos>x<|end|>y"]
NO_DATA = {"data.task": "files", "data.train_files": ("absent.parquet",), "reward.function": "absent.function"}


def hf_directory(path, name):
    """The small model `name` with a tokenizer, as it would lie in a download."""
    path.mkdir()
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DATA / name / file, path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "own": "kept"}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    character_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def save_checkpoint(config, step=3, mesh=None):
    """A checkpoint of `config` with random numbers in the place of all that is trained; returns the policy's."""
    arch, mesh = read_model(config.model)[0], mesh or one_device_mesh()
    settings = actor_settings(config, arch, mesh)
    actor, has_critic = build_actor(settings, mesh).trainable, uses_critic(config.algorithm)
    critic = build_critic(settings.passes, config.critic, mesh).trainable if has_critic else None
    shape = Models(actor=actor.state_shape, critic=critic.state_shape if critic is not None else None)
    rng = np.random.default_rng(step)
    values = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(leaf.dtype), shape)
    checkpoints = Checkpoints(checkpoint_dir(config.workdir, config.trainer), TrainerConfig(max_ckpt_to_keep=9))
    models = jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), values, shape)
    checkpoints.save(models, Progress(step=step), {"next_prompt": np.zeros(1)})
    checkpoints.close()
    write_config(config.workdir, dataclasses.asdict(config))
    return values.actor.params


def loaded(path):
    """The parameters of the model at `path`."""
    return load_params(path, read_architecture(path), lambda weight, array: array)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def encode(tokenizer, prompt):
    return tokenizer.encode_prompts([prompt], DataConfig())[0]


def assert_same_tokenizer(found, expected):
    for name in ("eos_ids", "pad_id", "special_tokens", "add_bos", "chat_template", "vocab_size"):
        assert getattr(found, name) == getattr(expected, name), name
    for text in TEXTS:
        assert encode(found, text) == encode(expected, text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
        if expected.chat_template is not None:
            messages = [{"role": "user", "content": text}]
            assert encode(found, messages) == encode(expected, messages)


def assert_transformers_has_the_tokenizer(path, expected):
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        assert found(text).input_ids == encode(expected, text)
        assert found.decode(expected.encode(text)) == expected.decode(expected.encode(text), skip_special_tokens=False)
        if expected.chat_template is not None:
            messages = [{"role": "user", "content": text}]
            prompt = found.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert found(prompt, add_special_tokens=False).input_ids == encode(expected, messages)
    assert {name: getattr(found, name) for name in expected.special_tokens} == expected.special_tokens


@pytest.mark.slow
def test_the_command_exports_what_a_run_has_trained(whole, tmp_path, capsys):
    config, output = small_config(whole[0]), tmp_path / "deep" / "export"
    command = ["--config", str(RECIPE), f"--config.workdir={config.workdir}"]
    main([*command, "--output", str(output), "--dtype", "float32"])
    assert f"after step 4 is in {output}, in float32" in capsys.readouterr().out
    assert_equal(loaded(output), whole[1])
    exported = with_values(config, {"model.path": str(output)})
    (arch, tokenizer), (found_arch, found_tokenizer) = read_model(config.model), read_model(exported.model)
    assert found_arch == arch
    assert_same_tokenizer(found_tokenizer, tokenizer)
    main([*command, f"--output={tmp_path / 'first'}", "--step=1"])
    assert json.loads((tmp_path / "first" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    first = loaded(tmp_path / "first")
    assert all((leaf != last).any() for leaf, last in zip(*map(jax.tree.leaves, (first, whole[1])), strict=True))


AXES = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
CRITIC = {"algorithm.adv_estimator": "gae"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run with a critic, and its policy after step 3 on one device and after step 12 on four."""
    folder = tmp_path_factory.mktemp("run")
    meshes = {3: one_device_mesh(), 12: mesh_of((1, 2, 2))}
    config = small_config(folder, **CRITIC)
    return folder, {step: save_checkpoint(config, step, mesh) for step, mesh in meshes.items()}


def test_a_random_models_export_is_the_checkpoint_and_has_its_tokenizer(run, tmp_path):
    config, policies = small_config(run[0]), run[1]
    assert export(config, tmp_path / "new", dtype="float32") == 12
    assert export(config, tmp_path / "old", dtype="float32", step=3) == 3
    assert_equal(loaded(tmp_path / "new"), policies[12])
    assert_equal(loaded(tmp_path / "old"), policies[3])
    assert_same_tokenizer(load_tokenizer(tmp_path / "new"), character_tokenizer())
    hf = json.loads((tmp_path / "new" / "config.json").read_text())
    assert hf["max_position_embeddings"] == config.data.max_prompt_length + config.data.max_response_length
    assert_transformers_has_the_tokenizer(tmp_path / "new", character_tokenizer())
    with pytest.raises(ValueError, match=re.escape("--step=4 must be a checkpoint") + r".* one of \[3, 12\]"):
        export(config, tmp_path / "out", step=4)
    for name, value in (("model.random.hidden_size", 64), ("model.lora.rank", 2), ("seed", 9), ("model.path", "x/y")):
        message = f"{name}={value} contradicts the run in workdir={run[0]}, .*: leave it out"
        with pytest.raises(ValueError, match=message):
            export(small_config(run[0], **{name: value}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{**AXES, **CRITIC}, {"actor.optim.moments_dtype": "bfloat16"}])
def test_only_the_policy_is_read_on_any_mesh_without_an_accelerator(run, tmp_path, changes):
    """Neither the critic nor the moments are wanted, nor has the config to say that the run had them."""
    config = with_values(small_config(run[0], **changes), {"model.attention": "splash"})
    export(config, tmp_path / "out", dtype="float32")
    assert_equal(loaded(tmp_path / "out"), run[1][12])


def test_a_directorys_own_files_are_kept_but_for_what_no_longer_holds_in_config_json(tmp_path):
    source = hf_directory(tmp_path / "model", "qwen3_qknorm")
    (source / "special_tokens_map.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    stale = {"quantization_config": None, "auto_map": {"AutoModel": "own.Model"}}
    hf = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(hf | stale))
    config = small_config(tmp_path / "run", **{"model.path": str(source)}, **NO_DATA)
    params = save_checkpoint(config)
    export(config, tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {path.name for path in source.iterdir()} - {"pytorch_model.bin"} | {"README.md"}
    for name in files - {"config.json", "model.safetensors", "README.md"}:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    hf, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", source))
    for key in stale:
        del original[key]
    both = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_theta": 1e6, "rope_scaling": None}
    assert hf == original | both and original["dtype"] == "float32"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype.name for tensor in tensors.values()} == {"bfloat16"}
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype(np.float32), params)
    assert_equal(loaded(tmp_path / "out"), rounded)
    assert_same_tokenizer(load_tokenizer(tmp_path / "out"), load_tokenizer(source))


@functools.partial(jax.jit, static_argnums=3)
def score(params, tokens, mask, arch):
    return logits(params, forward(params, tokens, positions_of(mask), mask, arch), arch)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_our_logits_and_token_ids_from_an_export(tmp_path, name):
    # Before 5 it does not read the config.json of some of these models, which is theirs, not ours.
    transformers, torch = pytest.importorskip("transformers", minversion="5"), pytest.importorskip("torch")
    source = hf_directory(tmp_path / "model", name)
    config = small_config(tmp_path / "run", **{"model.path": str(source)})
    params = save_checkpoint(config)
    export(config, tmp_path / "out", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reference = np.load(DATA / name / "reference.npz")
    tokens, mask = reference["input_ids"], reference["attention_mask"].astype(bool)
    theirs = np.zeros(reference["logits"].shape, np.float32)
    for row, ids, real in zip(theirs, tokens, mask, strict=True):  # alone: padding changes what recurrent models say
        with torch.no_grad():
            row[real] = model(torch.tensor(ids[real][None], dtype=torch.long)).logits[0].numpy()
    ours = np.asarray(score(params, tokens, mask, read_architecture(source)))
    np.testing.assert_allclose(ours[mask], theirs[mask], rtol=0, atol=tolerance(name))
    assert np.abs(ours[mask] - reference["logits"][mask]).max() > 1e-2, "it is not the model that the run began with"
    if name != "qwen2_bias_tied":  # transformers 5 gives every qwen2 the words of Qwen's own tokenizer
        assert_transformers_has_the_tokenizer(tmp_path / "out", load_tokenizer(source))


def test_adapters_are_merged_or_written_alone_with_the_names_that_peft_reads(tmp_path, capsys):
    source = hf_directory(tmp_path / "model", "qwen3_qknorm")
    lora = {"model.lora.rank": 2, "model.lora.alpha": 3.0, "model.lora.target_modules": ("all-linear",)}
    config = small_config(tmp_path / "run", **{"model.path": str(source)}, **lora)
    adapters = save_checkpoint(config)["layers"]
    export(config, tmp_path / "merged", dtype="float32")
    base, found = loaded(source), loaded(tmp_path / "merged")
    present = present_targets(read_architecture(source))
    for name in map(TARGETS.get, present):
        first, second = adapters[f"{name}_lora_a"], adapters[f"{name}_lora_b"]
        before = base["layers"].pop(name)
        change = 1.5 * first.reshape(len(first), -1, 2) @ second.reshape(len(second), 2, -1)
        assert np.abs(change).max() > 1e-4
        np.testing.assert_allclose(
            found["layers"].pop(name), before + change.reshape(before.shape), rtol=0, atol=1e-6, err_msg=name
        )
    assert_equal(found, base)

    export(config, tmp_path / "alone", dtype="float32", adapter=True)
    files = {path.name for path in (tmp_path / "alone").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    tensors = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * adapters["query_lora_a"].shape[0]
    stem = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    np.testing.assert_array_equal(tensors[stem + "A.weight"], adapters["down_lora_a"][1].T)
    np.testing.assert_array_equal(tensors[stem + "B.weight"], adapters["down_lora_b"][1].T)
    described = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert described["target_modules"] == list(present)
    assert described["r"] == 2 and described["base_model_name_or_path"] == str(source)
    assert described["lora_alpha"] == 3.0

    # The command takes the model from the run, whatever the recipe says, and refuses options that contradict it.
    command = [f"--config={RECIPE}", f"--config.workdir={tmp_path / 'run'}", "--dtype=float32"]
    main([*command, f"--output={tmp_path / 'again'}"])
    assert_equal(loaded(tmp_path / "again"), loaded(tmp_path / "merged"))
    line = capsys.readouterr().err
    assert re.search(f"as in the run .*: model.path={source} .not random., .*model.lora.alpha=3.0 .not 16.0.", line)
    assert str(source.name) in (tmp_path / "again" / "README.md").read_text()
    with pytest.raises(SystemExit) as end:
        main([*command, "--config.model.lora.alpha=64", f"--output={tmp_path / 'none'}"])
    message = (
        "dapo_jax: model.lora.alpha=64.0 contradicts the run in workdir=.*, which was trained with 3.0: leave it out\n"
    )
    assert end.value.code == 2 and re.fullmatch(message, capsys.readouterr().err)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="model.lora.rank=0 contradicts"):
        export(small_config(tmp_path / "run", **{"model.path": str(source)}), tmp_path / "none", adapter=True)
    plain = small_config(tmp_path / "plain", **{"model.path": str(source)})
    save_checkpoint(plain)
    with pytest.raises(ValueError, match="--adapter needs a run with adapters"):
        export(plain, tmp_path / "none", adapter=True)
    drawn = small_config(tmp_path / "drawn", **lora)
    save_checkpoint(drawn)
    with pytest.raises(ValueError, match="--adapter: a random model has no files that PEFT could load: export the"):
        export(drawn, tmp_path / "none", adapter=True)
    assert not [*tmp_path.glob("none*")]


@pytest.mark.parametrize("options", [{}, {"model.lora.rank": 2}])
def test_a_run_that_began_from_the_file_of_an_earlier_version_is_exported(tmp_path, monkeypatch, options):
    monkeypatch.setattr(smollm2, "SMOLLM2", str(tmp_path / "SmolLM2"))
    monkeypatch.setattr(smollm2, "SMOLLM2_FILE", str(tmp_path / "SmolLM2.gguf"))
    smollm2_file.write(tmp_path / "SmolLM2.gguf")
    config = small_config(tmp_path / "run", **{"model.path": smollm2.SMOLLM2_FILE, **options})
    params = save_checkpoint(config)
    export(config, tmp_path / "out", dtype="float32")
    if not options:
        assert_equal(loaded(tmp_path / "out"), params)
    assert read_architecture(tmp_path / "out") == smollm2_file.ARCH
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = [smollm2_file.ID[token] for token in ("<|start|>", "<|end|>")]
    assert [hf["max_position_embeddings"], hf["bos_token_id"], hf["eos_token_id"]] == [777, *ids]
    expected = load_tokenizer(tmp_path / "SmolLM2")
    assert_same_tokenizer(load_tokenizer(tmp_path / "out"), expected)
    assert_transformers_has_the_tokenizer(tmp_path / "out", expected)


def test_without_a_checkpoint_or_into_something_nothing_is_written(tmp_path):
    config, held = small_config(tmp_path / "run"), tmp_path / "held"
    with pytest.raises(ValueError, match=f"workdir={config.workdir} must be that of a run, but holds no config.json"):
        export(config, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    write_config(config.workdir, dataclasses.asdict(config))
    with pytest.raises(ValueError, match="must belong to a run with a saved checkpoint, but .*checkpoints holds none"):
        export(config, tmp_path / "out")
    write_config(config.workdir, dataclasses.asdict(config) | {"surprise": 1})
    with pytest.raises(ValueError, match="config.json has options that dapo_jax .* does not know: surprise; it was"):
        export(config, tmp_path / "out")
    held.mkdir()
    (held / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(ValueError, match=f"--output={held} must be a new or an empty directory"):
        export(config, held)
    assert (held / "model.safetensors").read_bytes() == b"precious"
