"""A sweep in pods: its owner in the first one, a slot in each, and what its client has of it."""
