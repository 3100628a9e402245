"""What a node can say of itself; runs on nodes. Standard library only."""
