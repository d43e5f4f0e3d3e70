"""The signature pool: Ray actors that keep expert counts of live traffic and make routing tables from them."""
