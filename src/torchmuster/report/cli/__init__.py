"""The commands `muster report` and `muster top`."""
