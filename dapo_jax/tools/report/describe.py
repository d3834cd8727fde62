"""Host: a run in sentences: what was trained, how, how far it came."""

from dapo_jax.command.tasks import NO_FUNCTIONS
from dapo_jax.monitor.console import STAGES
from dapo_jax.monitor.environment import TOTAL_STEPS
from dapo_jax.monitor.statistics import HELD_OUT
from dapo_jax.tools.report.numbers import (
    alarm_steps,
    duration,
    groups,
    names,
    number,
    percent,
    ratio,
    short_power,
    stage_seconds,
    total,
    values,
)
from dapo_jax.tools.report.read import SOLVED, RunFiles
from dapo_jax.tools.report.words import ALARMS, ESTIMATORS


def progress(run: RunFiles) -> str:
    """How many steps are done, and whether the run has ended."""
    done, planned = _steps(run)
    if done and done == planned:
        return f"Complete: {steps(run)} steps."
    if run.error.startswith(SOLVED):
        return f"{steps(run)} steps are done, and the run has ended: {run.error}."
    if run.error:
        reason = run.error.removeprefix("the run ends: ")
        return f"{steps(run)} steps are done. The run ended with an error at {run.last_line}: {reason}"
    seen = f"; the last line of its log is from {run.last_line}" if run.last_line else ""
    return f"{steps(run)} steps are done: still running, or stopped{seen}."


def steps_left(run: RunFiles) -> int:
    """How many steps a run lacks, as far as it is known: 0 if its data is solved."""
    done, planned = _steps(run)
    return 0 if run.error.startswith(SOLVED) else max(planned - done, 0)


def steps(run: RunFiles) -> str:
    """Finished and planned steps: 30 of 40."""
    done, planned = _steps(run)
    return f"{done:,} of {planned:,}" if planned else f"{done:,}"


def _steps(run: RunFiles) -> tuple[int, int]:
    """Finished and planned steps; 0 where the number of steps of its epochs is not recorded."""
    by_option = not run.option("trainer.total_epochs") and run.option("trainer.total_training_steps")
    planned = run.environment.get(TOTAL_STEPS, by_option)
    done = run.rows[-1]["step"] if run.rows else 0
    return done, planned if isinstance(planned, int) and planned > 0 else 0


def findings(run: RunFiles) -> list[str]:
    """What a reader should know first, a sentence each."""
    sentences = [*filter(None, [run.note]), progress(run), *(_held_out_change(run, metric) for metric in held_out(run))]
    if run.steps:
        sentences += filter(None, [_filtered(run), _time(run)])
        on = [name for name, found in alarm_steps(run.rows).items() if found]
        titles = "; ".join(ALARMS[name].title if name in ALARMS else name for name in on)
        sentences.append(f"Alarms: {titles}." if on else "No alarm was raised.")
    return sentences


def _held_out_change(run: RunFiles, metric: str) -> str:
    task, samples = HELD_OUT.fullmatch(metric).groups()  # pyright: ignore[reportOptionalMemberAccess]
    points = values(run.rows, metric)
    (first, before), (last, after) = points[0], points[-1]
    name = f"Held-out accuracy on {task} (mean of {samples} samples)"
    if len(points) == 1:
        return f"{name} was {number(before)} at step {first}."
    step, best = max(points, key=lambda point: point[1])
    verb = "rose" if after > before else "fell" if after < before else "went"
    at_best = "the best of the run" if best == after else f"the best was {number(best)} at step {step}"
    return f"{name} {verb} from {number(before)} at step {first} to {number(after)} at step {last}; {at_best}."


def _filtered(run: RunFiles) -> str:
    found = groups(run.steps)
    if found["kept"] == found["sampled"]:
        return ""
    generated, trained = (total(run.steps, f"dynamic_sampling/{name}_tokens") for name in ("generated", "trained"))
    return (
        f"The filter dropped {percent(1 - found['kept'] / found['sampled'])} of {number(found['sampled'])} sampled "
        f"groups: {number(found['all_wrong'])} all wrong, {number(found['all_correct'])} all right. The run sampled "
        f"{number(ratio(generated, trained))} tokens for each token that it trained on."
    )


def _time(run: RunFiles) -> str:
    seconds = stage_seconds(run.rows)
    if not seconds:
        return ""
    stage, most = next(iter(seconds.items()))
    whole = sum(seconds.values())
    return f"It worked for {duration(whole)}; {STAGES.get(stage, stage)} took most, {percent(most / whole)}."


def held_out(run: RunFiles) -> list[str]:
    """The metrics of held-out accuracy that have a value."""
    return [name for name in names(run.rows) if HELD_OUT.fullmatch(name) and values(run.rows, name)]


def algorithm(run: RunFiles) -> list[str]:
    """How the run trains, in a few sentences; none without its options."""
    if not run.config:
        return []
    option = run.option
    samples, size = option("rollout.n"), option("data.train_batch_size")
    if option("algorithm.filter_groups.enable") and samples != 1:  # a group of one is kept
        sampling = (
            f"Each step samples {samples} responses per prompt, and goes on until {size} groups {_kept(run)} "
            "(dynamic sampling)"
        )
    else:
        sampling = f"Each step samples {samples} responses to each of {size} prompts, and drops no group"
    estimator = option("algorithm.adv_estimator")
    if estimator in ("grpo", "dapo") and not option("algorithm.norm_adv_by_std_in_grpo"):
        estimator = "dr_grpo"
    advantages = ESTIMATORS.get(estimator, f"Advantages are those of {estimator}")
    if teacher := option("algorithm.distillation.path"):
        judged = f"the teacher {teacher} judges each token"
        alone = option("algorithm.distillation.use_task_rewards") is False
        advantages = f"T{judged[1:]}, and no reward counts" if alone else f"{advantages}; {judged} as well"
    return [
        f"{sampling}.",
        f"{advantages}.",
        f"{_update(run)}.",
        f"{_penalties(run)}.",
    ]


def _kept(run: RunFiles) -> str:
    """What the group filter asks of a group."""
    names = ("rule", "metric", "filter_low", "filter_high", "std_threshold")
    rule, metric, low, high, above = (run.option(f"algorithm.filter_groups.{name}") for name in names)
    if rule == "mean_range":
        return f"have a mean {metric} between {low} and {high}"
    if rule == "mixed":
        return f"have responses with {metric} above 0 and others without"
    return f"differ in {metric}" + f" by a standard deviation above {above}" * bool(above)


def _update(run: RunFiles) -> str:
    option = run.option
    batch, mini = option("data.train_batch_size"), option("actor.ppo_mini_batch_size")
    updates = (batch // mini if batch and mini else 1) * (option("actor.ppo_epochs") or 1)
    loss = option("actor.policy_loss.loss_mode")
    low, high = option("actor.clip_ratio_low"), option("actor.clip_ratio_high")
    clip = f"the ratio clipped at {1 - low:g} and {1 + high:g}" if loss == "vanilla" else f"the loss {loss}"
    return (
        f"{'One update follows' if updates == 1 else f'{updates} updates follow'}, with {clip}, averaged by "
        f"{option('actor.loss_agg_mode')}, at learning rate {short_power(format(option('actor.optim.lr'), 'g'))}"
    )


def _penalties(run: RunFiles) -> str:
    option = run.option
    places = {
        f"in the loss ({option('actor.kl_loss_coef')})": option("actor.use_kl_loss"),
        f"in the reward ({option('algorithm.kl_ctrl.kl_coef')})": option("algorithm.use_kl_in_reward"),
    }
    kl = " and ".join(place for place, used in places.items() if used)
    buffer = option("reward.overlong_buffer.len")
    overlong = (
        f"Responses are penalised over their last {buffer} tokens before the limit"
        if option("reward.overlong_buffer.enable")
        else "Long responses are not penalised"
    )
    if (form := option("reward.length.form")) not in (None, "none"):
        overlong += f", a length reward ({form}, weight {option('reward.length.weight')}) is added"
    return f"{overlong}, and there is {f'a KL penalty {kl}' if kl else 'no KL penalty'}"


def data(run: RunFiles) -> str:
    """The problems that are trained on, in words."""
    option = run.option
    task = option("data.task")
    if task == "arithmetic":
        low, high = option("data.arithmetic.low"), option("data.arithmetic.high")
        return f"arithmetic with {option('data.arithmetic.operators')}, operands from {low} to {high}"
    if task == "reasoning_gym":
        return f"reasoning_gym: {', '.join(option('data.reasoning_gym.datasets') or ())}"
    return ", ".join(option("data.train_files") or ()) or "-"


def held_out_data(run: RunFiles) -> str:
    """The problems that are never trained on, in words."""
    tasks = run.option("evaluate.tasks")
    files = [*(run.option("data.val_files") or ()), *(["evaluate.tasks"] if tasks not in (None, "{}") else [])]
    task = run.option("data.task")
    count = run.option(f"data.{task}.num_heldout") or 0
    count *= len(run.option(f"data.{task}.datasets") or [task])  # of each data set
    return ", ".join(files) or (f"{count} problems of the same kind" if count else "none")


def _reward(run: RunFiles) -> str:
    """What scores the responses, in words."""
    option = run.option
    functions, model, played = map(option, ("reward.functions", "reward.model.path", "environment.path"))
    given = option("reward.function") if functions in (None, NO_FUNCTIONS) else functions
    others = [f"the model {model}"] * bool(model) + ["the environment, if it gives rewards"] * bool(played)
    return ", ".join([given] * bool(given and (given != "none" or not others)) + others)


def facts(run: RunFiles) -> dict[str, str]:
    """Name and value of what identifies a run."""
    option, env = run.option, run.environment
    versions = env.get("versions") or {}
    seconds = stage_seconds(run.rows)
    limits = f"{option('data.max_prompt_length')} and {option('data.max_response_length')} tokens"
    return {
        "Model": str(option("model.path") or "-"),
        "Adapters": f"LoRA of rank {option('model.lora.rank')}" if option("model.lora.rank") else "none, all weights",
        "Training data": data(run) if run.config else "-",
        "Held-out data": held_out_data(run) if run.config else "-",
        "Reward": _reward(run) or "-",
        "Longest prompt and response": limits if run.config else "-",
        "In the words of its log": run.description or "-",
        "Devices": ", ".join(filter(None, [env.get("devices"), _processes(env.get("processes"))])) or "-",
        "Host": str(env.get("host") or "-"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or "-",
        "Seed": str(option("seed") if option("seed") is not None else "-"),
        "Steps": steps(run),
        "Time in steps, evaluations and saving": duration(sum(seconds.values())) if seconds else "-",
        "Tokens sampled": number(total(run.steps, "dynamic_sampling/generated_tokens")),
        "Tokens trained on": number(total(run.steps, "dynamic_sampling/trained_tokens")),
        "Work directory": str(run.folder),
    }


def _processes(count: object) -> str:
    return "" if not isinstance(count, int) else "1 process" if count == 1 else f"{count} processes"
