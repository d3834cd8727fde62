"""Host: uploads a directory to a model repository of the Hugging Face hub."""

import re
from pathlib import Path

from dapo_jax.errors import InputError

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LOG_IN = "log in by `hf auth login` or set HF_TOKEN, with a token that may write"


def check_upload(repository: str) -> None:
    """Raises InputError if nothing can be uploaded: no OWNER/NAME, no token. Does not contact the hub."""
    if not _NAME.fullmatch(repository):
        raise InputError(f"--push-to-hub={repository} must be OWNER/NAME of the Hugging Face hub: correct it")
    from huggingface_hub import get_token

    if not get_token():
        raise InputError(f"--push-to-hub={repository} needs a token of the Hugging Face hub: {_LOG_IN}")


def upload(directory: Path, repository: str, *, private: bool, message: str) -> str:
    """Makes the repository if need be, commits the files of `directory` to it, and returns its address.

    Args:
        private: of a new repository; one that exists stays as it is.
        message: of the commit.

    Raises:
        InputError: the token may not write there.
        RuntimeError: the hub cannot be reached, or refuses. The directory stays.
    """
    from huggingface_hub import HfApi, constants

    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message=message)
    except Exception as error:  # the library's own, those of its HTTP client and the system's have no common class
        by_hand = f"the directory {directory} is complete: upload it by `hf upload {repository} {directory}`"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
            raise InputError(f"--push-to-hub={repository} is refused ({reason}): {_LOG_IN}; {by_hand}") from error
        raise RuntimeError(
            f"{repository} cannot be uploaded to {constants.ENDPOINT} ({reason}): check the network and "
            f"HF_HUB_OFFLINE; {by_hand}"
        ) from error
    return str(address)
