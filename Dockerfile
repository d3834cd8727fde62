# An image that trains: the arguments of the container are those of dapo_jax.train.
#
#   docker build --build-arg EXTRA=cuda12 -t dapo_jax:cuda12 .
#   docker run --gpus all -v /shared:/shared dapo_jax:cuda12 --config=configs/tiny.py --config.workdir=/shared/runs/tiny
#
# EXTRA is tpu, cuda12 or cuda13: the wheels bring CUDA, the host brings the driver. The extra gcs reads and writes gs://.
FROM python:3.12-slim
ARG EXTRA=tpu
WORKDIR /app

# The dependencies alone first, so that another line of code does not install them again.
COPY setup.py pyproject.toml README.md ./
COPY dapo_jax/__init__.py dapo_jax/
RUN mkdir configs && pip install --no-cache-dir --editable ".[$EXTRA,gcs]"
COPY dapo_jax dapo_jax
COPY configs configs

RUN useradd --uid 1000 --create-home dapo && install --directory --owner dapo runs
USER 1000
ENTRYPOINT ["python", "-m", "dapo_jax.train"]
