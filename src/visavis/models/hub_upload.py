"""Upload of folders to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from visavis.core.errors import SpecError, StorageError, format_value, requires_extra

REPO_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
"""Pattern of the name of a repository with its owner."""


def validate_repo(repo: str, name: str = "repo") -> None:
    """Check the name of a repository before any work is done for it.

    Args:
        repo: Name, such as ``owner/model``.
        name: Name of the argument.

    Raises:
        SpecError: If it is not a name.
        MissingExtra: If huggingface_hub is not installed.
    """
    if not REPO_NAME.fullmatch(repo):
        raise SpecError(
            f"{name}: expected owner/name of a repository of the Hugging Face hub, got "
            f"{format_value(repo)}. Pass such a name."
        )
    with requires_extra("hf", "an upload to the hub"):
        import huggingface_hub  # noqa: F401


def upload_folder(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload all files of a folder in one commit.

    Args:
        folder: The folder.
        repo: Name of the repository. It is created if it does not exist.
        private: Whether a new repository is private.

    Returns:
        Address of the commit.

    Raises:
        StorageError: If the hub refuses the upload or is not reachable.
    """
    import huggingface_hub

    try:
        api = huggingface_hub.HfApi(library_name="visavis")
        api.create_repo(repo, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message="Upload a model of visavis"
            ).commit_url
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StorageError(
            f"{repo}: expected an upload to the Hugging Face hub, got {reason.rstrip('.')}. Log in "
            "with hf auth login, or check the network."
        ) from None
