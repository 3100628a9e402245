"""Files: the names in the run directory, atomic writes, and a writer that never blocks its caller."""
