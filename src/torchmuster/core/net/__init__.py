"""The authenticated channel, its messages, and the sockets of a node. Standard library only."""
