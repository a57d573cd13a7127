"""The engine: an offloaded model's passes, block by block, with the model's own forward intact."""
