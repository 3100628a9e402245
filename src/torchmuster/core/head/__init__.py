"""The head of a training run: it hears agents, a policy decides. Standard library only."""
