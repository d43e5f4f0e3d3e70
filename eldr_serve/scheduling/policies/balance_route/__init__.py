"""BalanceRoute's policies, which balance the KV load of all workers by a lookahead or a similarity band."""
