"""Turns the facts of nodes into findings, with the standard library only."""
