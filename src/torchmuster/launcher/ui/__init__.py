"""What is printed: tables, the status line, words for ranks."""
