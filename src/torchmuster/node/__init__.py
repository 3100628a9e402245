"""What runs on every node: the agent of a training run and what it keeps. Standard library only."""
