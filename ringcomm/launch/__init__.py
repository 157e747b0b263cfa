"""run(), and the `ringcomm` command: cli.py calls its subcommands, which are modules."""
