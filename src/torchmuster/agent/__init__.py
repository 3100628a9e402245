"""One agent per node, and the coordinator in the head's: standard library only."""
