"""torchmuster from Python: launch, and the handles of runs."""
