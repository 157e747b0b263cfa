"""Ways to carry out an operation that do without messages, or go through host memory."""
