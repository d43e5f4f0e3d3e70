"""The admission of requests: limits on predicted latency, on waiting prompts and on retries."""
