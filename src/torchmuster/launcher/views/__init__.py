"""Commands that look at a run from outside."""
