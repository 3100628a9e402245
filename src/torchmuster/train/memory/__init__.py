"""Snapshots in memory that the agents of the nodes hold, between those on disk."""
