"""The agent of one node, its workers and their output. Standard library only."""
