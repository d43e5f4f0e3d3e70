"""Keys of ours in `kv_transfer_params` that an engine's connector reads or writes."""

SIGNATURE = "eldr_signature"  # on a prefill's answer: packed expert counts of the prompt
REQUEST = "eldr_request"  # the caller's name for a prompt, to abandon its blocks or hear its signature by
CALIBRATE = "eldr_calibrate"  # asks for the counts of prefill and decode
ROUTES = "eldr_routes"  # with CALIBRATE: asks for the routes too
