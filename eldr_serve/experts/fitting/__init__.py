"""Fits of routing tables to calibration traces. The modules import scikit-learn, this package does not."""

MIN_REQUESTS_PER_WORKER = 8  # a cluster of fewer requests is meaningless
