"""The job's interpreter, with torch imported once, from which workers are forked."""
