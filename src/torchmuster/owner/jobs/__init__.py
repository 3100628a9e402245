"""Runs as jobs of a scheduler: submitted, followed, conducted inside, continued in another."""
