"""What `benchmarks/train.py` is made of: cases, the scripts of their workers, and the report."""
