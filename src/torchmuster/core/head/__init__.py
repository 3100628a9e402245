"""The head of a training run: it hears agents, and its policy decides. Standard library only."""
