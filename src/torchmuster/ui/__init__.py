"""What the user sees: messages and tables, readable without colour."""
