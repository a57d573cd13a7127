"""From a machine, a model and a job to a plan: where everything lives and what it will cost."""
