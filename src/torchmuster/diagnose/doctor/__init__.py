"""From the facts of nodes to findings. Standard library only."""
