"""The commands beside muster run."""
