"""One module per collective: it checks the arguments once, for every device, into an Operation."""
