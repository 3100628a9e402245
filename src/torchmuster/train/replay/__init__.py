"""`muster replay`: the workers of a run that makes one step of an earlier run again, and looks into it."""
