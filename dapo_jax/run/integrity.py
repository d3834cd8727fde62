"""Host: whether what is read from a checkpoint is what was saved, and what the run needs."""

import asyncio
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dapo_jax.errors import InputError
from dapo_jax.parallel.checksums import checksums
from dapo_jax.run.progress import Progress

_RECORD = "record"  # name of the checksum of all else in the record


def sealed(progress: Progress, models: Any, stream: Any) -> dict[str, Any]:
    """The record of `progress`, plain JSON data, with checksums of the arrays and of itself.

    Every process must call it.

    Raises:
        SharedFailure: copies of an array on several devices differ.
    """
    return resealed(progress, {"arrays": checksums(models), "stream": _of_stream(stream)})


def resealed(progress: Progress, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of `progress`, with the checksums of the arrays that another `record` has."""
    arrays = {name: record[name] for name in ("arrays", "stream") if name in record}
    record = json.loads(json.dumps(dataclasses.asdict(progress) | arrays))
    return {**record, _RECORD: _of_record(record)}


def opened(record: Mapping[str, Any], step: int) -> Progress:
    """The progress of a record. InputError unless it is whole and of this step.

    A checkpoint of an earlier version has no checksums, and lacks what that version did not know.
    """
    values = {name: value for name, value in record.items() if name != _RECORD}
    if _RECORD in record and record[_RECORD] != _of_record(values):
        raise InputError("not the bits that were saved: its progress")
    if values.get("step") != step:
        raise InputError(f"its progress is that of step {values.get('step')}")
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(Progress)}):
        raise InputError(f"its progress has {', '.join(unknown)}, which only a newer dapo_jax knows")
    return Progress(**values)


def check_arrays(progress: Progress, models: Any) -> None:
    """InputError unless the arrays of `models`, which may be a part of those saved, are as they were saved.

    Every process must call it.
    """
    found = checksums(models) if progress.arrays else {}
    if changed := [name for name, checksum in found.items() if progress.arrays.get(name) != checksum]:
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        raise InputError(f"not the bits that were saved: {changed[0]}{more}")


def check_stream(progress: Progress, stream: Any) -> None:
    """InputError unless what is saved besides models and progress is as it was saved."""
    if progress.stream not in ("", _of_stream(stream)):
        raise InputError("not the bits that were saved: its prompts and groups")


def _named(tree: Any) -> dict[str, Any]:
    """Each leaf by its path, as Orbax names it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def check_shapes(step: int, saved: dict[str, jax.ShapeDtypeStruct], wanted: Any) -> None:
    """InputError unless the arrays that were saved have the names and shapes of `wanted`."""
    found, needed = ({name: tuple(leaf.shape) for name, leaf in tree.items()} for tree in (saved, _named(wanted)))
    differing = sorted(name for name in found | needed if found.get(name) != needed.get(name))
    if differing:
        name = differing[0]
        raise InputError(
            f"the checkpoint of step {step} is of another model: {len(differing)} arrays differ, {name} has shape "
            f"{found.get(name, 'none')} there and {needed.get(name, 'none')} in this run: choose another workdir, or "
            "the model.path, model.lora and optimizer settings that the checkpoint was made with"
        )


def restore_as(
    wanted: Any, saved: dict[str, jax.ShapeDtypeStruct], *, partial_restore: bool = False
) -> ocp.args.PyTreeRestore:
    """Arguments to restore arrays laid out as in `wanted`, in the dtypes in which they were saved."""
    dtypes = [saved[name].dtype for name in _named(wanted)]
    leaves, structure = jax.tree.flatten(wanted)
    shape = structure.unflatten(leaf.update(dtype=dtype) for leaf, dtype in zip(leaves, dtypes, strict=True))
    arguments = ocp.checkpoint_utils.construct_restore_args(shape)
    return ocp.args.PyTreeRestore(shape, restore_args=arguments, partial_restore=partial_restore)


def in_dtype(array: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """`array` as it is, or in another dtype if that of the moments has been changed."""
    return array if array.dtype == wanted.dtype else jax.device_put(array.astype(wanted.dtype), wanted.sharding)


def _of_record(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _of_stream(stream: Any) -> str:
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(stream)[0]:
        array = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode() + array.tobytes())
    return found.hexdigest()


class _WholeLoop(asyncio.SelectorEventLoop):
    """Closes only after its tasks have ended. An interrupt waits for none, and leaves the loop open.

    Orbax closes its loop at the first array that it cannot read. The other reads would then print tracebacks, some of
    them only when Python exits.
    """

    def close(self) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, Exception):
            return
        while error is not None and not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextmanager
def whole_loops() -> Iterator[None]:
    """Inside, every new event loop closes only after its tasks have ended."""
    before, asyncio.new_event_loop = asyncio.new_event_loop, _WholeLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = before
