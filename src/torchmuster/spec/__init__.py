"""User input, parsed at one place and checked completely: all problems are reported at once."""
