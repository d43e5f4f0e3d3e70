"""Keys that our connector reads or writes in `kv_transfer_params`, and reserved HTTP headers."""

EXPERT_COUNTS = "eldr_expert_counts"  # in a prefill answer: packed expert counts of the prompt
REQUEST = "eldr_request"  # the caller's name of a prompt, to abandon its blocks or to get its counts
CREATED = "eldr_created_cache_tokens"  # in a prefill answer: prompt tokens written to the prefix cache
CALIBRATE = "eldr_calibrate"  # request decode counts, and prefill counts if the engine prefills
ROUTES = "eldr_routes"  # with CALIBRATE: request the routes too

# Headers that only the serving code may send to an engine; clients' own are dropped.
STEERING_HEADERS = frozenset({"x-vllm-priority"})
