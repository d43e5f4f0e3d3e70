"""Engine replicas as Ray Serve deployments, and the channels to them.

In an engine replica: servers, llm_servers, engine_watch, rank_loads, sampling, pool_client, log_handlers.
In an ingress: fleet, directory, outliers, decode_start, kv_usage, waiters. Calls of both, with their answers:
drain, expert_swap, measured_counts. In Serve: autoscaling in its controller, request_router in its handles.
"""
