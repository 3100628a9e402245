"""The Python API: `launch`, and handles of runs."""
