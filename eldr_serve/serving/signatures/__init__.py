"""The signature pool: Ray actors that sample expert counts of live traffic and make routing tables."""
