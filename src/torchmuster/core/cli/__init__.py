"""The group of all commands, and muster run."""
