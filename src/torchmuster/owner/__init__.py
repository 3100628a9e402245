"""The owner of a run: it starts agents, keeps the head alive, and follows to the end."""
