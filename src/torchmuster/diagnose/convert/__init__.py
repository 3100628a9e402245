"""`muster convert`: torchrun boilerplate in a workflow file becomes a training task."""
