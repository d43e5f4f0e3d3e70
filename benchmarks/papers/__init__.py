"""What papers propose and this repository measures; no engine, server or job runs it.

`python -m benchmarks.papers.reproduce` draws the papers' figures, which are in `benchmarks.papers.figures`.
Other modules are methods that the figures compare: migration of expert placements, a forecast of a batch's
experts, a layer under expert parallelism, the optimal choice of replicas.
"""
