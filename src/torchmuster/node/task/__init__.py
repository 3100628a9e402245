"""The agent of one task of a workflow: inputs, command, outputs. Standard library only."""
