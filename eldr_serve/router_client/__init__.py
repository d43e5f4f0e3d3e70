"""The ingress's side of the DecodeRouter actor: score requests, ask for leases, place locally without it."""
