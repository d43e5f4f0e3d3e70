"""The KV connector: it moves KV blocks and expert counts from prefill to decode engines."""
