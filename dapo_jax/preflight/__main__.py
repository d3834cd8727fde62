"""Host: the preflight command: compiles every program of a training step for hardware you do not have.

    python -m dapo_jax.preflight --config FILE [--config.key=value ...] [--topology v5p:4x4x8] [--lengths LENGTHS]
                                 [--realistic] [--json FILE]

Prints the memory per device by kind, the FLOPs, bytes and collectives per step, a lower bound on the step's time and,
where kernels have been measured, the time to expect, and whether it fits; if not, which setting to change first. All
this is for the longest case: prompts and responses as long as the config allows. --lengths adds the time and the
efficiency to expect at other lengths, --realistic where the time to expect goes.

It needs no weights, data or tokenizer: it reads only config.json of model.path or, if that does not exist, the same
name in configs/shapes/ or on the Hugging Face hub. Nothing is allocated. Absent GPUs (h100:8, a100:2x8) need
pip install 'dapo_jax[cuda13]', TPU slices (v5p:4x4x8) 'dapo_jax[tpu-preflight]'.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("preflight")

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo_jax.command.command_line import read_config, refusals
from dapo_jax.command.help import command_parser
from dapo_jax.errors import say
from dapo_jax.parallel.memory import reserve_gpu_memory
from dapo_jax.preflight.lengths import FORM
from dapo_jax.preflight.report import preflight
from dapo_jax.preflight.tables import tables


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("python -m dapo_jax.preflight", __doc__, options="preflight")
    parser.add_argument(
        "--topology", default="cpu", help="v5e:4x4, v5p-256, h100:8, a100:2x8, ..., or this machine's cpu, gpu or tpu"
    )
    parser.add_argument(
        "--lengths",
        default="",
        help=f"of prompts and responses, for the expected time: {FORM}, or the metrics.jsonl of a run",
    )
    parser.add_argument(
        "--realistic", action="store_true", help="print the time to expect of each stage by class of kernels"
    )
    parser.add_argument("--json", help="write the JSON report to this file instead of printing it last")
    given, rest = parser.parse_known_args(arguments)
    command = ["preflight", *rest]
    with refusals(command):
        config = read_config(command)
        reserve_gpu_memory(config.trainer.gpu_memory_fraction)
        report = preflight(config, given.topology, lengths=given.lengths, progress=sys.stderr)
        say(tables(report, realistic=given.realistic))
        if given.json:
            Path(given.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        else:
            say(json.dumps(report))


if __name__ == "__main__":
    main()
