"""The owner of a run: it starts agents, keeps the head alive and writes the result."""
