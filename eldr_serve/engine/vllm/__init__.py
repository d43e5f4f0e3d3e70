"""vLLM engines that count experts: the implementation of `eldr_serve.engine.protocol`.

An engine has processes of three kinds; an engine of one rank on a CPU has the last two in one process.

- The replica, a Ray actor with vLLM's client of its engine core: `engine` and `requests`, the metrics in
  `stats`, and `measurements`.
- The engine core with vLLM's scheduler: `scheduler`, `prefix_events`, and `kv.connector` with its
  `scheduler_side`.
- A worker for each rank: `worker`, `gpu_worker`, `capture`, `ep`, and `kv.connector` with its `worker_side`.

In each step the core sends the workers a plan, and the first worker returns counts (`kv.metadata`). The core
adds the counts of a request to its answer. Step records, KV usage and the counts of whole replicas go to the
replica with vLLM's statistics. There `stats` passes them to Prometheus, and to `engine` through
`measurements`.

The other modules configure, check and describe engines, and need no running engine.
"""
