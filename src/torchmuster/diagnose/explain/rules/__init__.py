"""Rules that argue causes from the events of a case: rows of tables, and functions that compare lines. Nothing here reads files."""
