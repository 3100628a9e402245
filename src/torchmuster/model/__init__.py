"""Frozen values without I/O: the words that all other packages share."""
