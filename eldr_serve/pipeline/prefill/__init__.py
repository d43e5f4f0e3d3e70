"""The prompt of a request: tokenised, and computed by a prefill engine or left to the decode engine."""
