"""What can be found out about a node and a failure. Standard library only."""
