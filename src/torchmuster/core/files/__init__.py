"""The run directory, atomic writes, the writer thread. Standard library only."""
