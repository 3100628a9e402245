"""muster session, dev and sweep."""
