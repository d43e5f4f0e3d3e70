"""BalanceRoute's policies: KV load of all workers, with a lookahead or a similarity band."""
