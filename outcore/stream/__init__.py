"""What moves when: lanes that work on their own, slots that weights stream through."""
