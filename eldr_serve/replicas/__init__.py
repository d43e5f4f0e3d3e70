"""Engine replicas as Ray Serve deployments, and the channels to them."""
