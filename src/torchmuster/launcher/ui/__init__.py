"""Terminal output: tables, the status line, formatted numbers and ranks."""
