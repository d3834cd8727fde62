"""One of the processes of test_processes.py: collects some batches and prints their contents.

    python process_worker.py PORT NUM_PROCESSES PROCESS_ID WORKDIR CHANGES ...

CHANGES: a JSON object of config keys and values; each is collected for by itself, one after the other.
"""

import hashlib
import json
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_run import small_config  # noqa: E402

from dapo_jax.config.sections import Config
from dapo_jax.run import open_run  # noqa: E402
from dapo_jax.state import first_state  # noqa: E402
from dapo_jax.step import sample_groups  # noqa: E402


def main() -> None:
    port, num_processes, process_id, workdir, *changes = sys.argv[1:]
    if int(num_processes) > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(num_processes), int(process_id))
    for number, text in enumerate(changes):
        collect_batches(small_config(f"{workdir}.{number}", **json.loads(text)))


def collect_batches(config: Config) -> None:
    """Prints one line per batch, for three batches."""
    with open_run(config, initial_step=0) as run:
        state = first_state(run)
        models, progress, stream = state.models, state.progress, state.stream
        for step in range(1, 4):
            weights = run.learner.decode_weights(models.actor.params)
            accepted = sample_groups(run, weights, stream, step=step, version=step - 1, kl_coef=progress.kl_coef)
            experience, stream = accepted.experience or accepted.state.begun, accepted.state
            assert experience is not None  # the first steps of partial rollouts only begin groups
            found = {
                "numbers": experience.numbers.tolist(),
                "kept": [round_.keep.tolist() for round_ in accepted.rounds],
                "tokens": hashlib.sha256(experience.responses.tobytes()).hexdigest(),
                "seq_reward": experience.score("seq_reward").tolist(),
                "logprob": float(experience.logprobs.sum()),
                "next": stream.next_prompt,
            }
            print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
