"""Two programs that inject faults into the service, and check that it loses no request (`docs/faults.md`).

1. `python -m tests.faults simulate` runs the serving code on virtual time, without Ray, vLLM or a network.
   One seed is one run. The modules build on each other in this order:

   - `virtual_time`, `virtual_network`: an event loop that runs several processes, and their connections.
   - `greedy_model`, `fake_engines`, `fake_ray`: what takes the place of the model, of vLLM and of Ray.
   - `world`: the application from the real serving code on top of these fakes.
   - `clients`: HTTP clients, each with a script, and what they saw.
   - `schedule`: the requests and faults that a seed draws.
   - `invariants`: what must hold when the faults are over.
   - `checks`: what clients may see, and the record of a run.
   - `provoked_cases`: cases that chance seldom produces.
   - `simulate`: one run from its start to the last check.
   - `mutations`: errors that are inserted into the serving code to check that the runs find them.

2. `python -m tests.faults chaos` starts the whole application on Ray, and kills and stops its processes
   under load. Its modules are `chaos` (one run), `operations` (faults and recoveries), `traffic` (clients),
   `steadiness` (memory, descriptors and event loops) and `record` (events and their sums).
"""
