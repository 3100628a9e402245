"""The commands that start runs."""
