"""Studies: what papers propose and this repository measures, and that no engine, server or job runs.

`python -m benchmarks.papers.reproduce` draws the papers' figures; `benchmarks.papers.figures` holds them. The rest are methods
that they compare: migration of expert placements, a forecast of the experts of a batch, a layer under expert
parallelism, the optimal choice of replicas.
"""
