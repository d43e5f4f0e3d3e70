"""Queues and rates: predicted waits, retry times, expected starts at an engine."""
