"""Agreement on the ranks that are in the job, by point-to-point messages alone."""
