"""The server: a process on each node of a session that forks a run's agents, with torch imported."""
