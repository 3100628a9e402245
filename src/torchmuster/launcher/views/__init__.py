"""Views of a run from outside, and commands to it."""
