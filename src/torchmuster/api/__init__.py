"""torchmuster from Python: `launch` starts what `muster run` would start, and `Run` is a run as its directory shows it."""
