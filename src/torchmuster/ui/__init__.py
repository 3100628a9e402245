"""Output for the user: messages and tables, readable without colour."""
