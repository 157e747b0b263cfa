"""`ringcomm run`: plans a job, starts it, passes signals on, and judges how it ended."""
