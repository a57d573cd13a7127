"""Durable state: what a run needs to go on to the same bits, committed whole or not at all."""
