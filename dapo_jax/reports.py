"""Host: what a step and a run report beside the numbers of their algorithms."""

from pathlib import Path

from dapo_jax.checkpoint import Progress
from dapo_jax.config import checkpoint_dir
from dapo_jax.evaluation import mean_accuracy
from dapo_jax.monitor.records import read_metrics
from dapo_jax.rollout.experience import Experience
from dapo_jax.run import Run


def performance_metrics(run: Run, trained: Experience | None, seconds: float) -> dict[str, float]:
    """`perf/` and `timing_s/` of a step; evaluation and saving are not part of its seconds."""
    if trained is None:
        return {"perf/time_per_step": seconds, "timing_s/step": seconds}
    prompt_tokens = sum(len(prompt) for prompt in trained.prompts) * trained.finished.shape[1]
    tokens = trained.num_tokens + prompt_tokens
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / run.num_devices,
        "timing_s/step": seconds,
    }


def sample_texts(run: Run, experience: Experience) -> list[dict]:
    """The first sample of the first accepted groups, with its scores, for samples/."""
    texts = []
    for group in range(min(run.config.monitor.num_samples, len(experience))):
        row = run.train_set.rows[experience.rows[group]]
        texts.append(
            {
                "prompt": run.sampler.tokenizer.decode(experience.prompts[group], skip_special_tokens=False),
                "response": experience.texts[group][0],
                "ground_truth": row.ground_truth,
                **{name: float(values[group, 0]) for name, values in experience.scores.items()},
            }
        )
    return texts


def summary(run: Run, progress: Progress) -> list[tuple[str, str]]:
    """The table at the end of a run."""
    workdir = Path(run.config.workdir)
    accuracies = [mean_accuracy(row) for row in read_metrics(workdir)]
    evaluated = [accuracy for accuracy in accuracies if accuracy is not None]
    names = ", ".join(f"{len(task.prompts)} x {task.options.n}" for task in run.task_sets)
    problems = f"problems x samples: {names}"
    seconds = sorted(run.timers.totals.items(), key=lambda item: -item[1])
    return [
        ("held-out accuracy before", f"{evaluated[0]:.3f} ({problems})" if evaluated else "-"),
        ("held-out accuracy after", f"{evaluated[-1]:.3f}" if evaluated else "-"),
        ("best", "-" if progress.best is None else f"{progress.best:.3f} after step {progress.best_step}"),
        ("tokens generated", f"{progress.tokens_generated:,}"),
        ("tokens trained", f"{progress.tokens_trained:,}"),
        ("groups kept", f"{progress.groups_kept:,}"),
        ("groups dropped", f"{progress.groups_dropped:,}"),
        ("seconds per stage", ", ".join(f"{stage} {time:.0f}" for stage, time in seconds)),
        ("TensorBoard", f"tensorboard --logdir {workdir / 'tensorboard'}"),
        ("checkpoints", checkpoint_dir(run.config)),
    ]
