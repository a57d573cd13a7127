"""AdamW over offloaded parameters: gradients, optimizer state, and who updates what when."""
