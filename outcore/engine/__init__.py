"""The engine: from an ordinary model to one whose tensors live where a plan says, and back."""
