"""What is known of a script before it is forked."""
