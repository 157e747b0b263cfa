"""How the ranks of a job agree on what is no data: commands, which the server that leads runs."""
