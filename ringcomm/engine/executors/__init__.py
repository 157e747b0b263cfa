"""The routes of an operation: messages, shared memory, a GPU; and what joined ranks do."""
