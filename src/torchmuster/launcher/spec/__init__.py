"""What a user wrote, parsed and checked: torchrun's options, sites, host files."""
