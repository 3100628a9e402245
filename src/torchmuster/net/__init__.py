"""The authenticated channel between agents, coordinator and client."""
