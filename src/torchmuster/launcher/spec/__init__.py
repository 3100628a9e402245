"""Parse and check what a user wrote: torchrun's options, sites, host files, YAML."""
