"""Programs on nodes beyond the agent: successors, debuggers. Standard library only."""
