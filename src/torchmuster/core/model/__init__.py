"""Values of a run and pure functions on them: no I/O, standard library only."""
