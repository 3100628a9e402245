"""What `benchmarks/launch.py` is made of: sides, jobs, cases and the report."""
