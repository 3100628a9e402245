"""Runs that are jobs of a scheduler: submitted, followed, conducted inside."""
