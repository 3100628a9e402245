"""The head of a group: barriers, restarts, order. Standard library only."""
