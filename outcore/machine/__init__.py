"""What a machine can do: measured here by a probe, or read from a catalogue of known machines."""
