"""Host: names on the Hugging Face hub, of models (OWNER/NAME) and of splits of data sets (hf://OWNER/NAME/SPLIT).

`@REVISION` (a branch, tag or commit) may follow, and `@COMMIT` follows the names in a run's config.json: there every
name is pinned, so that a resumed run reads the same files even if the branch has moved.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from dapo_jax.config.places import expanded, is_address

PREFIX = "hf://"  # of data sets: OWNER/NAME/FILE.parquet could also be a path
CONVERTED = "refs/convert/parquet"  # the branch on which the hub keeps data sets of other formats as Parquet
DATA_FORM = f"{PREFIX}OWNER/NAME/CONFIG/SPLIT, {PREFIX}OWNER/NAME/SPLIT or {PREFIX}OWNER/NAME/FILE, each with @REVISION"
GGUF = (  # what is wrong with a GGUF file as a model, and the fix
    "is a GGUF file, which is not read: convert it with transformers, by AutoModelForCausalLM.from_pretrained(FOLDER, "
    "gguf_file=FILE).save_pretrained(DIR) and the same with AutoTokenizer, and give DIR (for a run's "
    "checkpoints: in its config.json)"
)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)"
_MODEL = re.compile(rf"(?!models/|data/|runs/){_REPOSITORY}(?P<part>)")
_DATA = re.compile(rf"{PREFIX}(datasets/)?{_REPOSITORY}/(?P<part>[^@]+?)/?")


@dataclass(frozen=True)
class HubName:
    """A model or a split of a data set on the hub."""

    kind: str  # "model" or "dataset", as the hub says
    repository: str  # OWNER/NAME
    part: str = ""  # CONFIG/SPLIT, SPLIT or a file of a data set
    revision: str = ""  # branch or tag; empty = main
    commit: str = ""  # empty = not pinned yet

    def __str__(self) -> str:
        """The name as it is written in a config."""
        path = "/".join(filter(None, (self.repository, self.part)))
        return "@".join(filter(None, (PREFIX * (self.kind == "dataset") + path, self.revision, self.commit)))

    def at(self, commit: str, revision: str | None = None) -> "HubName":
        """The same, pinned to a commit."""
        return dataclasses.replace(self, commit=commit, revision=self.revision if revision is None else revision)

    def request(self) -> str:
        """The name that the user wrote, before it was pinned."""
        revision = "" if self.revision == CONVERTED else self.revision
        return str(dataclasses.replace(self, commit="", revision=revision))


def model_name(path: str) -> HubName | None:
    """The model on the hub that model.path names; None if it is a path. What exists on this machine always wins."""
    if is_address(path) or expanded(path).exists():
        return None
    return _parse("model", _MODEL, path)


def is_gguf(path: str | Path) -> bool:
    """Whether `path` names a GGUF file, here or on the hub."""
    return str(path).partition("@")[0].endswith(".gguf") and not Path(path).is_dir()


def data_name(path: str) -> HubName | None:
    """The split of a data set that an entry of data.train_files names; None if it is a path or malformed."""
    return _parse("dataset", _DATA, path) if path.startswith(PREFIX) else None


def _parse(kind: str, form: re.Pattern[str], text: str) -> HubName | None:
    path, *revisions = text.split("@")
    commit = revisions.pop() if revisions and _COMMIT.fullmatch(revisions[-1]) else ""
    found = form.fullmatch(path)
    if found is None or len(revisions) > 1 or "" in revisions or ".." in path:
        return None
    return HubName(kind, found["repository"], found["part"], revisions[0] if revisions else "", commit)
