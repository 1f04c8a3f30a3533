"""Who may do what, with every method of both protocols; and who can talk to whom."""
