"""The DecodeRouter actor, its state, and RouterClient for ingresses.

In the actor: actor, state, sessions, positions, settings_check, comparison, step_costs, decode_loads,
live_view, signature_plane, status, metrics, pool_link. In an ingress: client, link, calls, scorer, waiting,
local_fallback. Of both: messages, settings.
"""
