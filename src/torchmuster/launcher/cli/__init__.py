"""The commands other than `muster run`."""
