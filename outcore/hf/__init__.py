"""Outcore under the trainers of the Hugging Face libraries.

``outcore.hf.Trainer`` stands in for ``transformers.Trainer``; as the first base class it does the
same for every trainer that is made from it: ``class SFT(outcore.hf.Trainer, trl.SFTTrainer): ...``
"""

from outcore.hf.trainer import Trainer

__all__ = ["Trainer"]
