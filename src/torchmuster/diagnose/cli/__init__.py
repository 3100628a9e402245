"""The commands `muster doctor`, `explain`, `lint` and `plan`."""
