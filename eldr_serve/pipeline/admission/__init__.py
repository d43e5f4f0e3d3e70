"""Whether a request may proceed: limits on predicted latency, waiting prompts and retries."""
