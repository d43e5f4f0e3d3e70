"""Whole replicas behind several balancers: systems, workloads and reports of the comparison."""
