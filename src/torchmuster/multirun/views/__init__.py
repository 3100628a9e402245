"""Sessions and sweeps from outside."""
