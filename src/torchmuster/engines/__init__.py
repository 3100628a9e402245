"""Engines: each knows how to start one agent per node in one place, and nothing else."""
