"""One request: prefill, placement, decode, retries and resumption."""
