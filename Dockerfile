# An image that trains: the arguments of the container are those of dapo_jax.train.
#
#   docker build -t dapo_jax:cuda13 .
#   docker run --gpus all -v /shared:/shared dapo_jax:cuda13 --config=configs/tiny.py --config.workdir=/shared/runs/tiny
#
# EXTRA is cuda13, cuda12 (for drivers before 580) or tpu: the wheels bring CUDA, the host brings the driver. The extra
# gcs reads and writes gs://. scripts/test_package.sh runs the steps as plain commands.
FROM python:3.12-slim
ARG EXTRA=cuda13
WORKDIR /app

# The dependencies alone first, so that another line of code does not install them again.
COPY setup.py pyproject.toml README.md ./
COPY dapo_jax/__init__.py dapo_jax/
RUN mkdir -p configs scripts/launch && pip install --no-cache-dir --editable ".[$EXTRA,gcs]"
COPY dapo_jax dapo_jax
COPY configs configs
COPY scripts/launch scripts/launch

RUN useradd --uid 1000 --create-home dapo && mkdir runs && chown dapo runs
USER 1000
ENTRYPOINT ["python", "-m", "dapo_jax.train"]
