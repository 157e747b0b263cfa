"""The wire: who carries bytes between ranks, and how a rank waits for them."""
