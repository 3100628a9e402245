"""What will go wrong in a job script: read as a shell would, never run."""
