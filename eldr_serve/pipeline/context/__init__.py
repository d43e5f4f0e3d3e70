"""The state of a request over its attempts, and its record for the log and the status."""
