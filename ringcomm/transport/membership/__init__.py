"""Which ranks are still in the job: their agreement on it, by point-to-point messages alone."""
