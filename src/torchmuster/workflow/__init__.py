"""Workflows, groups of tasks from a file: format, owner, heads, agents, sandboxes, datasets."""
