"""The programs that are started on nodes, each by its path. Standard library only."""
