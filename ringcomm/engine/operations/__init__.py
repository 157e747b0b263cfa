"""One module per collective: it checks the arguments for every device, and makes an Operation."""
