"""The prompt: tokenised, and computed by a prefill engine or left to the decode engine."""
