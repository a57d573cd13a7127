"""The JSON of a tokenizer's directory, bounded before transformers reads it without a limit."""

from __future__ import annotations

from pathlib import Path

from outcore.limited_json import MOST_MEMORY_BYTES, memory_of, most_text
from outcore.model_config import check_counts
from outcore.units import format_bytes

_VOCABULARIES = {"tokenizer.json", "vocab.json", "tekken.json"}
# What else transformers reads of it; other JSON that lies there is nobody's business here.
_SETTINGS = {
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
}
_MOST_OF_VOCABULARY = 1 << 30  # twice what 262,000 tokens and 515,000 merges are counted as


def check_tokenizer_files(directory: Path) -> None:
    """Refuse files whose values would fill the memory; ValueError says which."""
    for name in sorted(_VOCABULARIES | _SETTINGS):
        file = directory / name
        if not file.is_file():
            continue
        most_bytes = _MOST_OF_VOCABULARY if file.name in _VOCABULARIES else MOST_MEMORY_BYTES
        with file.open("rb") as opened:
            data = opened.read(most_text(most_bytes) + 1)
        if memory_of(data) > most_bytes:
            raise ValueError(
                f"{file.name} would take more than {format_bytes(most_bytes)} of memory"
            )
    config = directory / "config.json"
    if config.is_file():  # which says what kind of tokenizer it is, where nothing else does
        check_counts(config)
