"""A model's forward and backward, block by block, and its loss in chunks."""
