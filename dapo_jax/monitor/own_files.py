"""Host: copies, in the workdir, of the files that functions of your own come from, and what has changed since."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from dapo_jax.own_functions import file_and_function

FOLDER = "functions"

logger = logging.getLogger(__name__)


def keep_files(workdir: str | os.PathLike[str], names: Mapping[str, str], *, done: int) -> None:
    """Copies each FILE.py:function to WORKDIR/functions/OPTION.py, and warns where a resumed run had another file.

    Args:
        names: of functions, by option; those of another form have no file to compare.
        done: training steps that a resumed run has behind it; 0 for a new run.
    """
    for option, name in names.items():
        found = file_and_function(name)
        if found is None or not found[0].is_file():
            continue
        copy, text = Path(workdir) / FOLDER / f"{option}.py", found[0].read_bytes()
        if done and copy.is_file() and copy.read_bytes() != text:
            before = copy.replace(copy.with_name(f"{option}.until_step_{done}.py"))
            logger.warning(
                "%s=%s: the file has changed since the run stopped, so steps from %d on are computed by another "
                "function; %s is what it was: put it back to resume as if the run had not stopped",
                option,
                name,
                done + 1,
                before,
            )
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(text)
