"""Finds mistakes in job scripts: parsed like a shell does, never run."""
