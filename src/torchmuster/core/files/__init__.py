"""The run directory, atomic writes, and threads that write files and the terminal."""
