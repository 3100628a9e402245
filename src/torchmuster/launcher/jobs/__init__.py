"""Runs that are jobs of a scheduler: submit them, follow them, conduct them inside the job."""
