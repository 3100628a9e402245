"""A pretended OpenPBS 23.06, in parts: see `pbs` beside this folder."""
