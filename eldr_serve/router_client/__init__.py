"""The ingress's side of the DecodeRouter actor: scores, leases, and local placement without the actor."""
