"""Sessions and sweeps from Python."""
