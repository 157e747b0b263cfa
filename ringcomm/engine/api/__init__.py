"""The public calls: collectives, messages, groups, handles; init and shutdown."""
