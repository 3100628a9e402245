"""The command line: parses, calls, prints, exits. Only here are errors caught."""
