"""Where a model's files are: in a directory, or in the cache of the Hugging Face Hub.

Only files that Outcore and tokenizers read are fetched: safetensors, JSON and vocabularies, no
pickles and no code; for a plan, config.json alone. With HF_HUB_OFFLINE set nothing is fetched, and
the cache must have them.
"""

from __future__ import annotations

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
# Other formats lie in folders; some models have a second copy of their weights beside the first.
_UNWANTED = ["*/*", "consolidated*"]


def is_hub_id(name: str | Path) -> bool:
    """Return whether this is an id of the Hub ("org/name") and no path."""
    path = Path(name).expanduser()
    # "models/llama" beside a folder "models" is a path, though it may be mistyped.
    is_path = path.exists() or path.parent.is_dir()
    return not is_path and _HUB_ID.fullmatch(str(name)) is not None


def model_directory(name: str | Path) -> Path:
    """Return the directory of a model, given as a path or as an id of the Hub ("org/name")."""
    return _directory(name, _WANTED)


def config_directory(name: str | Path) -> Path:
    """Return the directory of a model's config.json; of the Hub's files no other is fetched."""
    return _directory(name, ["config.json"])


def _directory(name: str | Path, wanted: list[str]) -> Path:
    if not is_hub_id(name):
        return Path(name).expanduser()
    from huggingface_hub import constants, snapshot_download

    try:
        found = snapshot_download(
            str(name),
            allow_patterns=wanted,
            ignore_patterns=_UNWANTED,
            local_files_only=bool(constants.HF_HUB_OFFLINE),
        )
    except Exception as error:  # its client's own, those of a network, and of a proxy
        raise ValueError(
            f"{name} is no directory, and cannot be had from the Hugging Face Hub: "
            f"{_reason(str(name), error)}"
        ) from error
    return Path(found)


def _reason(name: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        is_partial = hasattr(error, "snapshot_path")
        return (
            f"it is not {'whole ' if is_partial else ''}in the cache ({constants.HF_HUB_CACHE}), "
            + ("and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreached(error))
        )
    if isinstance(error, errors.GatedRepoError):
        return f"ask for access at https://huggingface.co/{name}, then log in: hf auth login"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "it has no such model, or a private one (hf auth login)"
    return _first_line(error)


def _unreached(error: Exception) -> str:
    cause = error.__cause__
    why = f" ({_first_line(cause)})" if isinstance(cause, Exception) else ""
    return f"and the Hub cannot be reached{why}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
