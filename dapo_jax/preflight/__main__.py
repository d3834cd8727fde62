"""Host: the preflight command: compiles every function of a training step for hardware you do not have.

    python -m dapo_jax.preflight --config FILE [--config.key=value ...] [--topology v5p:4x4x8] [--response_length N]
                                 [--quick] [--json FILE]

Prints bytes per device by kind against the device's memory, FLOPs, bytes and collectives of a step, an estimate of its
time, and whether it fits; if not, which setting to change first. It needs neither weights nor data nor a tokenizer: of
model.path only config.json is read, or, where that does not exist, configs/shapes/ of the same name. Nothing is
allocated. Absent GPUs (h100:8, a100:2x8) need pip install 'dapo_jax[cuda13]', TPU slices (v5p:4x4x8)
'dapo_jax[tpu-preflight]'.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("preflight")

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo_jax.command.command_line import read_config, refusals
from dapo_jax.command.help import about, options_help
from dapo_jax.parallel.memory import reserve_gpu_memory
from dapo_jax.preflight.report import preflight
from dapo_jax.preflight.tables import tables


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dapo_jax.preflight",
        description=about(__doc__),
        epilog=options_help("preflight"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--topology", default="cpu", help="v5e:4x4, v5p-256, h100:8, a100:2x8, ..., or cpu, gpu, tpu of this machine"
    )
    parser.add_argument("--response_length", type=int, help="tokens of each response, for the time; default: the limit")
    parser.add_argument("--quick", action="store_true", help="compile decoding for the first and last window alone")
    parser.add_argument("--json", help="file for the JSON report, which is printed last unless given")
    given, rest = parser.parse_known_args(arguments)
    command = ["preflight", *rest]
    with refusals(command):
        config = read_config(command)
        reserve_gpu_memory(config.trainer.gpu_memory_fraction)
        report = preflight(
            config, given.topology, response_length=given.response_length, quick=given.quick, progress=sys.stderr
        )
        print(tables(report))
        if given.json:
            Path(given.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        else:
            print(json.dumps(report))


if __name__ == "__main__":
    main()
