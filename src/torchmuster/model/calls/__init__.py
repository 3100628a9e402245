"""Functions that travel: the file of a call, and what may be pickled for it."""
