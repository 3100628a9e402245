"""What a user asks for on a command line, checked: all problems at once."""
