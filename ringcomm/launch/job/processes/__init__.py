"""The processes of a job: signals to its ranks, and waits that are in vain."""
