"""The side of the clients: tables, and their requests to servers, in order and within bounds."""
