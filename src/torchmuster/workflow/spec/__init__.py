"""Workflow files: from text to a checked plan."""
