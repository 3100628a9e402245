"""Values of jobs and of live views, without I/O."""
