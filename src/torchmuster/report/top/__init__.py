"""muster top: runs drawn live."""
