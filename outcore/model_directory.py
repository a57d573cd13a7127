"""Where a model's files are: in a directory, or in the cache of the Hugging Face Hub.

Only files that Outcore and tokenizers read are fetched: safetensors, JSON and vocabularies, no
pickles and no code. With HF_HUB_OFFLINE set nothing is fetched, and the cache must have them.
"""

from __future__ import annotations

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
# Other formats lie in folders; some models have a second copy of their weights beside the first.
_UNWANTED = ["*/*", "consolidated*"]


def model_directory(name: str | Path) -> Path:
    """Return the directory of a model, given as a path or as an id of the Hub ("org/name")."""
    path = Path(name).expanduser()
    # "models/llama" beside a folder "models" is a path, though it may be mistyped.
    if path.exists() or path.parent.is_dir() or not _HUB_ID.fullmatch(str(name)):
        return path
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    is_offline = bool(constants.HF_HUB_OFFLINE)
    try:
        found = snapshot_download(
            str(name),
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=is_offline,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (
            f"it is not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set"
            if is_offline
            else str(error).strip().partition("\n")[0]
        )
        raise ValueError(
            f"{name} is no directory, and cannot be had from the Hugging Face Hub: {reason}"
        ) from error
    return Path(found)
