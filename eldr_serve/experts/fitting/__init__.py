"""Fits of routing tables to calibration traces. Its modules import scikit-learn; this file does not."""

MIN_REQUESTS_PER_WORKER = 8  # a cluster of fewer requests is meaningless
