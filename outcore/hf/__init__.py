"""Outcore under the trainers of the Hugging Face libraries.

``outcore.hf.Trainer`` stands in for ``transformers.Trainer``; as the first base class it does the
same for every trainer that is made from it: ``class SFT(outcore.hf.Trainer, trl.SFTTrainer): ...``
"""

import importlib.util

if importlib.util.find_spec("accelerate") is None:
    raise ImportError("outcore.hf needs accelerate, as Trainer does: pip install 'outcore[hf]'")

from outcore.hf.trainer import Trainer

__all__ = ["Trainer"]
