"""Advice that fits the case: values worked out from the log, and how to install what is missing."""
