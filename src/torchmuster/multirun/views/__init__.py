"""The views of sessions and sweeps, for other processes than their owners."""
