"""The `ringcomm` command: cli.py finds the subcommand, each of which is a module of its own."""
