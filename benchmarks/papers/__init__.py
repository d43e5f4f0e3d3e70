"""Methods that papers propose and this repository measures. No engine, server or job uses them.

`python -m benchmarks.papers.reproduce` draws the papers' figures, which are in `benchmarks.papers.figures`.
The other modules are methods that the figures compare: migration of expert placements, a layer under expert
parallelism, the optimal choice of replicas, and others.
"""
