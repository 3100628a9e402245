"""The agent of one task, and the task's inputs and outputs. Standard library only."""
