"""The authenticated channel between agents, head and client."""
