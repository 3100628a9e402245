"""The door of a node that a session holds: it forks what a run needs there, with everything imported already."""
