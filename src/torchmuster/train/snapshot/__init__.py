"""Snapshots: whole or not there, verified when read, loaded without running code from a file."""
