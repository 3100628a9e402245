"""The hang watch of a head: which rank stands still, which is slow, and where they are. Standard library only."""
