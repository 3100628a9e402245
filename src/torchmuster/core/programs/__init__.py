"""Programs that are started on nodes by their path."""
