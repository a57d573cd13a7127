"""Tensors that are one parameter of the model and stand in its files twice.

Files of older programs hold both, with the same values. With others, the config is wrong: the
model has two parameters, and whichever was read, the other one's training would be lost.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from torch import nn

from outcore.errors import StoreError
from outcore.weights.checkpoint_files import CheckpointFiles
from outcore.weights.stored_layout import Layout


def check_tied(model: nn.Module, files: CheckpointFiles, layout: Layout, directory: Path) -> None:
    """Refuse files that have different values for what the model has once."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if len(pieces := layout.get(name, [])) == 1:
            names[id(parameter)].append(pieces[0].name)
    for first, *others in names.values():
        for other in others:
            if not files.are_equal(first, other):
                raise StoreError(
                    f"{directory}: {other} is {first} by the config, and its files hold different "
                    'values for the two: write "tie_word_embeddings": false into config.json',
                    path=directory,
                )
