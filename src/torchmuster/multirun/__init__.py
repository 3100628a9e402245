"""Sessions, `muster dev` and sweeps: everything that starts many runs."""
