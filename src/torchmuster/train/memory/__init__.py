"""Snapshots in memory, held by the nodes' agents between the snapshots on disk."""
