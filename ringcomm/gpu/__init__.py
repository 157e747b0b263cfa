"""Arrays on GPUs: what carries them between ranks, and what is here to do so."""
