"""Queues and rates: estimated waits, retry times, expected starts at an engine, prefill replicas."""
