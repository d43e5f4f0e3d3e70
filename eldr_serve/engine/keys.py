"""Keys of ours in `kv_transfer_params` that an engine's connector reads or writes, and headers."""

SIGNATURE = "eldr_signature"  # on a prefill's answer: packed expert counts of the prompt
REQUEST = "eldr_request"  # the caller's name for a prompt, to abandon its blocks or hear its signature by
CREATED = "eldr_created_cache_tokens"  # in a prefill answer: prompt tokens written to the prefix cache
CALIBRATE = "eldr_calibrate"  # request decode counts, and prefill counts if the engine prefills
ROUTES = "eldr_routes"  # with CALIBRATE: asks for the routes too

# Headers by which a client would tell an engine what only serving may say.
STEERING_HEADERS = frozenset({"x-vllm-priority"})
