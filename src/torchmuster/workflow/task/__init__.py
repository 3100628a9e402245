"""The agent of one task, its inputs and outputs. Standard library only."""
