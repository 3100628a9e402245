"""Finds mistakes in job scripts, which it parses as a shell does and never runs."""
