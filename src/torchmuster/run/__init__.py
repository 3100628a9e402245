"""Runs: make one, follow one, look at one."""
