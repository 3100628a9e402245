"""The head of a group: barriers, retries, the order of starts and stops. Standard library only."""
