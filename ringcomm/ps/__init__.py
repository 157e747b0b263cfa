"""The parameter server: tables and hash tables that ranks of the job keep for the others."""
