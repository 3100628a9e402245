"""What travels to nodes: the package, code, environments. Standard library only."""
