"""Environments that were sent to this node: where they lie, how they come, who uses them. Standard library only."""
