"""Advice for the case: values computed from the log, and how to install what is missing."""
