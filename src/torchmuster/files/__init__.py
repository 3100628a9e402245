"""Files: the run directory's names, atomic writes, and a writer that never blocks its caller."""
