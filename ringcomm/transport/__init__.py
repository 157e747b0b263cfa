"""Messages between ranks over MPI, the memory that they share, and news of failed ranks."""
