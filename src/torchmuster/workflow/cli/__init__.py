"""The commands for workflows and data."""
