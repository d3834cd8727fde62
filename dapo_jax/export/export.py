"""Host: the export command: writes the policy of a checkpoint as a Hugging Face model directory.

    python -m dapo_jax.export --config FILE [--config.key=value ...] --output DIR [--step N] [--dtype ...] [--adapter]
        [--keep-vision] [--push-to-hub OWNER/NAME [--private]]

transformers, vLLM and model.path read the directory. The model, its adapters and the seed are those of the run in
config.workdir, whatever FILE says. The command needs neither data nor an accelerator. On fewer devices than the run
had, add --config.mesh.fsdp=1 --config.mesh.expert=1 --config.mesh.tensor=1.
"""

import dataclasses
import functools
import json
import math
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dapo_jax.command.command_line import command
from dapo_jax.command.help import command_parser
from dapo_jax.command.output_directory import new_output, output_directory
from dapo_jax.config.derived import checkpoint_dir
from dapo_jax.config.places import place_of
from dapo_jax.config.sections import Config, DataConfig
from dapo_jax.config.values import DEFAULTS, flat
from dapo_jax.data.tokenizer import Tokenizer
from dapo_jax.errors import InputError, say
from dapo_jax.export.hub import check_upload, model_card, recipe, upload
from dapo_jax.hub.names import model_name
from dapo_jax.hub.repositories import model_at
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.families import FAMILIES
from dapo_jax.models.hf_architecture import described, takes_images
from dapo_jax.models.identity import Identity
from dapo_jax.models.lora import Lora, adapter_table, peft_config
from dapo_jax.models.weights import Weight, weight_table
from dapo_jax.models.write_safetensors import with_weights, write_safetensors
from dapo_jax.models.write_whole import check_whole, whole_config, write_whole
from dapo_jax.monitor.bars import bar, shows_progress
from dapo_jax.monitor.recipe import known_config, recorded_config
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.processes import first_per_host, gather, is_first
from dapo_jax.run.base_models import lora_of, read_model, trained_params, with_base
from dapo_jax.run.checkpoint import saved_steps
from dapo_jax.run.downloads import with_downloads
from dapo_jax.run.meshes import check_weights
from dapo_jax.run.other_runs import RANDOM, Trained, first_model

DTYPES = ("bfloat16", "float32")
COPIED = (  # the files of a Hugging Face directory to copy, if they exist
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
PROCESSORS = "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"  # of images


def export(
    config: Config,
    output: str | Path,
    *,
    step: int | None = None,
    dtype: str = DTYPES[0],
    adapter: bool = False,
    keep_vision: bool = False,
) -> int:
    """Writes the policy after training step `step` to the directory `output`, and returns the step.

    Every process must call it; process 0 writes. The directory appears only when it is complete.

    Args:
        step: of a checkpoint in config.workdir; None means the newest.
        dtype: of the weights; float32 keeps the trained values bit for bit (adapters: merged into float32 weights).
        adapter: write only the adapters of model.lora, for PEFT, instead of a model with the adapters merged in.
        keep_vision: write the whole model that the run's text part is from, with that part replaced.

    Raises:
        InputError: `output` is not empty, there is no such checkpoint, `config` contradicts the run's config.json,
            `adapter` is set without model.lora, or `keep_vision` without a model that takes images.
    """
    output, (config, _) = new_output(output), as_trained(config, DEFAULTS)
    directory = checkpoint_dir(config.workdir, config.trainer)
    step = _chosen_step(config.workdir, directory, step)
    if adapter and not config.model.lora.rank:
        raise InputError("--adapter needs a run with adapters, but model.lora.rank=0: leave it out")
    config = with_downloads(config, training=False, data=False, weights=bool(config.model.lora.rank))
    arch, tokenizer = read_model(config.model)
    images_from = whole_model(config.model.path, arch, adapter=adapter) if keep_vision else None
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, expert=config.mesh.expert)
    check_weights(arch, mesh)
    params, saved = trained_params(Trained(config, directory, step), arch, mesh)
    card = model_card(flat(config), step, adapter=adapter, images=keep_vision) if is_first() else None
    form: Any = {"dtype": dtype, "adapter": adapter, "images_from": images_from}
    write_policy(config, arch, tokenizer, mesh, params, output, **form, card=card, saved=saved)
    return step


def whole_model(path: str, arch: Architecture, *, adapter: bool) -> Path:
    """The directory of the model that also takes images from which model.path=`path` is; InputError if there is none.

    Every process must call it.
    """
    if adapter:
        raise InputError("--adapter and --keep-vision exclude each other: leave one out")
    if (first := first_model(path)) == RANDOM:
        raise InputError("--keep-vision: a random model has no part for images: leave it out")
    source = first_per_host(lambda: model_at(first, weights=True))
    check_whole(source, arch, first)
    return source


def as_trained(config: Config, chosen: Collection[str]) -> tuple[Config, tuple[str, ...]]:
    """The config of the run in config.workdir, on the mesh of `config`, and what differs of the model, in words.

    Every process must call it; process 0, which has the records, decides.

    Args:
        chosen: keys of `config` that may not contradict the run; the others give way.

    Raises:
        InputError: the workdir has no config.json, this version does not know an option in it, or `chosen` contradicts
            it.
    """
    workdir = config.workdir
    recorded = gather(recorded_config(workdir) if is_first() else None)[0]
    if not recorded:
        raise InputError(
            f"workdir={workdir} must be that of a run, but holds no config.json: give the run's workdir by "
            "--config.workdir, or train first"
        )
    run = known_config(recorded, workdir)
    given, theirs = flat(config), flat(run)
    sections = ["model.lora."] * (run.model.lora.rank > 0) + ["model.random.", "seed"] * (run.model.path == RANDOM)
    keys = ["model.path", "model.lora.rank", *(key for key in theirs if key.startswith(tuple(sections)))]
    differing = [key for key in dict.fromkeys(keys) if given[key] != theirs[key]]
    if _names_same(config.model.path, run.model.path):
        differing = [key for key in differing if key != "model.path"]
    problems = [
        f"{key}={given[key]} contradicts the run in workdir={workdir}, which was trained with {theirs[key]}: leave it "
        f"out{', or correct the path in its config.json if the model has moved' * (key == 'model.path')}"
        for key in differing
        if key in chosen
    ]
    if problems:
        raise InputError("\n".join(problems))
    kept = config.trainer.checkpoint_dir or run.trainer.checkpoint_dir
    trainer = dataclasses.replace(run.trainer, checkpoint_dir=kept)
    run = dataclasses.replace(run, workdir=workdir, mesh=config.mesh, monitor=config.monitor, trainer=trainer)
    changes = ", ".join(f"{key}={theirs[key]} (not {given[key]})" for key in differing)
    return run, (f"as in the run {workdir}: {changes}",) if changes else ()


def _names_same(given: str, recorded: str) -> bool:
    """Whether `recorded` is model.path=`given`, pinned to a commit or to a step of a run."""
    name, place = model_name(recorded), place_of(recorded)
    is_step = place.parent.name == "checkpoints" and place.parent.parent == place_of(given)
    return place == place_of(given) or is_step or (name is not None and name.request() == given)


def write_policy(
    config: Config,
    arch: Architecture,
    tokenizer: Tokenizer,
    mesh: Mesh,
    params: Any,
    output: Path,
    *,
    dtype: str,
    adapter: bool,
    images_from: Path | None = None,
    card: str | None = None,
    saved: Identity | None = None,
) -> None:
    """Writes a policy with these trained `params`, sharded over `mesh`, to the new directory `output`; see `export`.

    Args:
        images_from: the `whole_model` whose text part this is, and whose rest is kept; None = the text part alone.
        card: the text of README.md; None = no such file.
        saved: see `with_base`.
    """
    lora, shown = lora_of(config.model.lora, arch), shows_progress(config.trainer, config.monitor)
    if adapter:
        _check_base(config.model.path)
    with output_directory(output) as directory:
        if card is not None:
            (directory / "README.md").write_text(card, encoding="utf-8")
        if adapter:
            assert lora is not None
            if is_first():
                _write_json(directory / "adapter_config.json", _adapter_config(config.model.path, lora))
            write = functools.partial(write_safetensors, name="adapter_model")
            _write(directory, adapter_table(arch, lora), params, dtype, write, shown=shown)
            return
        if is_first():
            model = first_model(config.model.path)
            if images_from is not None:
                _copy_description(images_from, whole_config(images_from, dtype), directory)
            elif model == RANDOM:
                _write_description(arch, tokenizer, config.data, directory, dtype)
            else:
                source = model_at(model, weights=False)
                _copy_description(source, with_weights(described(source), arch, dtype), directory)
        whole = with_base(config, arch, mesh, params, saved).params
        parts = functools.partial(write_whole, source=images_from, arch=arch) if images_from else write_safetensors
        _write(directory, weight_table(arch), whole, dtype, parts, shown=shown)


def _check_base(path: str) -> None:
    """InputError if PEFT could not put adapters of model.path=`path` on it."""
    first, cure = first_model(path), "export the merged model, without --adapter"
    if first == RANDOM:
        raise InputError(f"--adapter: a random model has no files that PEFT could load: {cure}")
    if takes_images(model_at(first, weights=False)):
        raise InputError(
            f"--adapter: PEFT would look for the adapters of the text part of {path} in the whole model: {cure}"
        )


def _adapter_config(path: str, lora: Lora) -> dict[str, Any]:
    """PEFT's, which names the model and its commit apart."""
    name = model_name(path)
    if name is None or name.part:
        return peft_config(lora, path)
    return peft_config(lora, name.repository) | {"revision": name.commit or name.revision or None}


def _write(
    directory: Path, table: Sequence[Weight], params: dict[str, Any], dtype: str, write: Any, *, shown: bool
) -> None:
    """Writes the weights by `write`; `shown`: show a progress bar."""
    total = sum(math.prod(weight.shape) for weight in table) * np.dtype(dtype).itemsize
    with bar("writing the weights", total=total, unit="B", shown=shown) as written:
        write(directory, table, params, dtype=dtype, on_tensor=written.update)


def _chosen_step(workdir: str, directory: str, step: int | None) -> int:
    saved = gather(saved_steps(directory))[0]  # a run that goes on may save or remove one between two looks
    if not saved:
        raise InputError(
            f"workdir={workdir} must belong to a run with a saved checkpoint, but "
            f"{directory} holds none: give the run's workdir by --config.workdir, or train first"
        )
    if step is not None and step not in saved:
        raise InputError(f"--step={step} must be a checkpoint of workdir={workdir}: choose one of {saved}")
    return saved[-1] if step is None else step


def _copy_description(source: Path, hf: dict[str, Any], output: Path) -> None:
    """Copies the files of a Hugging Face directory except its weights, with config.json as `hf`."""
    _write_json(output / "config.json", hf)
    for name in COPIED + (PROCESSORS if "text_config" in hf else ()):
        if (source / name).exists():
            shutil.copyfile(source / name, output / name)


def _write_description(arch: Architecture, tokenizer: Tokenizer, data: DataConfig, output: Path, dtype: str) -> None:
    """Writes the same files for a random model, a Llama without a bos token."""
    length = data.max_prompt_length + data.max_response_length
    [eos_id] = tokenizer.eos_ids
    special = {"eos_token_id": eos_id, "pad_token_id": tokenizer.pad_id}
    hf = {
        "architectures": [FAMILIES[arch.family].architecture_name(scalar_head=False)],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "rms_norm_eps": arch.rms_norm_eps,
        "max_position_embeddings": length,
        "initializer_range": arch.initializer_range,
        "hidden_act": arch.activation,
        "attention_bias": arch.output_bias,
        "mlp_bias": arch.mlp_bias,
        "bos_token_id": None,
        **special,
    }
    _write_json(output / "config.json", with_weights(hf, arch, dtype))
    _write_json(output / "generation_config.json", special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    _write_json(output / "tokenizer_config.json", settings | dict(tokenizer.special_tokens))
    tokenizer.backend.save(str(output / "tokenizer.json"))
    if tokenizer.chat_template is not None:
        (output / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("python -m dapo_jax.export", __doc__, options="export")
    parser.add_argument("--output", required=True, help="directory to write, new or empty")
    parser.add_argument("--step", type=int, help="training step of the checkpoint, default the newest")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights, default %(default)s")
    parser.add_argument("--adapter", action="store_true", help="only the adapters of model.lora, for PEFT")
    parser.add_argument("--keep-vision", action="store_true", help="the whole model with the text part replaced")
    parser.add_argument("--push-to-hub", metavar="OWNER/NAME", help="also upload it to the Hugging Face hub")
    parser.add_argument("--private", action="store_true", help="make a new repository of the hub private")
    given, rest = parser.parse_known_args(arguments)
    with command(["export", *rest]) as (config, origin):
        if given.push_to_hub:
            check_upload(given.push_to_hub)
        elif given.private:
            raise InputError("--private needs --push-to-hub OWNER/NAME: add it, or leave it out")
        config, lines = as_trained(config, origin.given)
        if is_first():
            for line in lines:
                say(f"dapo_jax: {line}", sys.stderr)
        form: Any = {"dtype": given.dtype, "adapter": given.adapter, "keep_vision": given.keep_vision}
        step = export(config, given.output, step=given.step, **form)
        if is_first():
            say(f"the policy of {config.workdir} after step {step} is in {given.output}, in {given.dtype}")
            if given.push_to_hub:
                how = recipe(config.algorithm, config.actor.policy_loss.loss_mode)
                message = f"{Path(config.workdir).name} after step {step}, trained with {how}"
                output = Path(given.output).expanduser().absolute()
                address = upload(output, given.push_to_hub, private=given.private, message=message)
                say(f"it is also at {address}")
