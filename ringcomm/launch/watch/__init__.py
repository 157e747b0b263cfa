"""`ringcomm top`: finds the live jobs of this user on this host, and shows what their ranks do."""
