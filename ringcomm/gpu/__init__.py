"""Arrays on GPUs: their executor, transports, devices and kernels."""
