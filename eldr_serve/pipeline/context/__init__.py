"""What a request leaves for its next attempts, the log and the status."""
