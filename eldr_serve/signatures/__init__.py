"""The signature pool: Ray actors that collect expert counts of live traffic and fit routing tables."""
