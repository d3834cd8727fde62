"""Runs a notebook from start to end and writes it back with its outputs, as a reader would see them.

    python scripts/docs/run_notebook.py notebooks/first_run.ipynb --folder /tmp/first_run

FOLDER is the current directory of its cells; runs that are there already are resumed.
"""

import argparse
from pathlib import Path
from typing import Any

import nbclient  # pyright: ignore[reportMissingImports]
import nbformat  # pyright: ignore[reportMissingImports]


def run(path: Path, folder: Path) -> None:
    """Writes the notebook with its outputs, and without the traces of a machine: times, widgets, versions of tools."""
    notebook = nbformat.read(path, as_version=4)
    folder.mkdir(parents=True, exist_ok=True)
    nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}}).execute()
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    nbformat.write(notebook, path)


def joined(outputs: list[Any]) -> list[Any]:
    """Outputs with one text for each stream, in which a carriage return has overwritten its line."""
    texts: dict[str, Any] = {}
    found = []
    for output in outputs:
        if output.output_type != "stream":
            found.append(output)
        elif output.name in texts:
            texts[output.name].text += output.text
        else:
            texts[output.name] = output
            found.append(output)
    for output in texts.values():
        lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in output.text.split("\n")]
        output.text = "\n".join(lines).replace(str(Path.home()), "~")
    return [output for output in found if output.output_type != "stream" or output.text.strip()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    run(given.notebook, given.folder)
