"""What a user wrote, parsed once at the edge and checked all at once."""
