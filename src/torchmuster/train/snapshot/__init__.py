"""Snapshots: complete or absent, verified when read, loaded without running code from a file."""
