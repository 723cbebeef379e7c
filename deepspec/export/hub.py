"""An export as a repository of the Hugging Face hub, with its card. Only ever on request (``export.push_to_hub``)."""

import logging
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from deepspec.artifacts import read_manifest
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a finished export to ``owner/name``, making the repository if there is none. Returns its address.

    Files of an earlier upload that this export does not have are deleted there. Raises InputRefused for a folder that
    is not a finished export, and for whatever the hub refuses.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.status != "complete":
        raise InputRefused(f"{folder} is not a finished export, so it is not pushed. Export again.")
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True, repo_type="model")
        api.upload_folder(
            repo_id=repository, folder_path=str(folder), repo_type="model", delete_patterns="*",
            commit_message=f"Drafter {manifest.inputs.get('drafter', '')[:12]} for target "
                           f"{manifest.inputs.get('target', '')[:12]}")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputRefused(f"export.push_to_hub={repository!r}: {str(error).strip().splitlines()[0]}. The export in "
                           f"{folder} is complete; log in (hf auth login) or correct the name, and run the same "
                           "command again.") from None
    address = f"{api.endpoint}/{repository}"
    log.info("pushed to %s", address)
    return address
