"""Values without I/O, and text about them. Standard library only."""
