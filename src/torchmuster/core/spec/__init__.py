"""Check what a user requests on a command line, and report all problems at once."""
