"""What the first pod of a run, or of a group of a workflow, does to own it: the others are reached through their doors."""
