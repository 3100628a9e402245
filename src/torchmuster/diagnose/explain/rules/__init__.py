"""Rules that argue causes from a case: rows of tables, and functions. Nothing here reads files."""
