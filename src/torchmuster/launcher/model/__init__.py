"""Values for jobs and for live views, without I/O."""
