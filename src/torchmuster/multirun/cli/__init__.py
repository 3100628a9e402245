"""The commands `muster session`, `muster dev` and `muster sweep`."""
