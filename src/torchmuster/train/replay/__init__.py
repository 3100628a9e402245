"""`muster replay`: workers that repeat one step of an earlier run, and inspect it."""
