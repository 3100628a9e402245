"""Programs that a test puts in the place of real ones."""


def shell_program(path, text):
    """Make a program of a few lines for the shell; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
