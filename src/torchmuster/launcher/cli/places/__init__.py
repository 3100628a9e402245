"""Places for runs: hosts, jobs of a scheduler."""
