"""Programs on nodes besides the agent: successors of a lost head, debugger sessions."""
