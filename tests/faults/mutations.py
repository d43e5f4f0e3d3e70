"""Errors in the serving code that the simulated runs must detect.

A mutation replaces one piece of a module's source text, for example the release of a lease by `pass`. It does
so while the module is imported; no file changes. `search` then runs seeds with and without the mutation: a
seed detects it if the run with the mutation has a violation and the run without it has none.

So the mutations test the checks of the runs: a check that misses an error of the service would also miss a
mutation. `MUTATIONS` is ordered by the part of the service. A unit test requires that the text of each
mutation occurs exactly once in its module: change it here when you change that code.
"""

import importlib
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import CodeType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Mutation:
    """One error in the serving code.

    Attributes:
        name: what is wrong with the mutated service.
        module: dotted name of the module.
        old: the text to replace, which occurs exactly once in the module.
        new: its replacement.
    """

    name: str
    module: str
    old: str
    new: str = "pass"


MUTATIONS = (
    # -- a request's path
    Mutation(
        "a lease is not released",
        "eldr_serve.pipeline.attempt",
        "self._placement.release(context)",
    ),
    Mutation(
        "a retry decodes from blocks that were read before",
        "eldr_serve.pipeline.attempt",
        "prompt = await self._prefill.prepare(context, admission_result)",
        "prompt = context.__dict__.get('kept') or await self._prefill.prepare(context, admission_result)\n"
        "                context.__dict__['kept'] = prompt",
    ),
    Mutation(
        "a cancel is lost on its way to the decode engine",
        "eldr_serve.pipeline.decode.leased_decode",
        "        if self.call is not None and not self.has_ended:\n            self.call.cancel()\n",
        "",
    ),
    Mutation(
        "blocks are freed while an engine may still read them",
        "eldr_serve.pipeline.attempt",
        "reader=reader",
        "reader=None",
    ),
    Mutation(
        "blocks that nobody reads are not released",
        "eldr_serve.pipeline.prefill.kv_release",
        "create_task(self._send_release(request_id, replica, reader))",
        "create_task(asyncio.sleep(0))",
    ),
    Mutation(
        "a finished background task is kept",
        "eldr_serve.pipeline.prefill.kv_release",
        "        task.add_done_callback(self._background.discard)\n",
        "",
    ),
    Mutation(
        "a stream whose engine is lost ends as if it were whole",
        "eldr_serve.pipeline.path",
        'yield error_event("engine_lost", reason, context.request.method)',
        "yield b'data: [DONE]\\n\\n'",
    ),
    Mutation(
        "an answer that moves to another engine ends instead",
        "eldr_serve.pipeline.path",
        "if not moves.is_moving(context.request_id):",
        "if True:",
    ),
    Mutation(
        "the prefill of a resumed answer lacks the generated tokens",
        "eldr_serve.pipeline.prefill.split_prefill",
        "request.cache_salt,\n                generated=bytes(context.answer.encoded_ids),",
        "request.cache_salt,",
    ),
    Mutation(
        "an answer that continues on another engine begins again",
        "eldr_serve.pipeline.decode.leased_decode",
        "            generated=bytes(context.answer.encoded_ids),\n            created",
        "            created",
    ),
    Mutation(
        "the ids of one token are lost",
        "eldr_serve.pipeline.context.partial_answer",
        "self.num_tokens += chunk.num_tokens",
        "self.num_tokens += max(chunk.num_tokens - 1, 0)",
    ),
    Mutation(
        "the permit of a retry is not released",
        "eldr_serve.pipeline.admission.retry_limiter",
        "self._permits.release()",
    ),
    Mutation(
        "an answer that prefill refuses to continue is lost",
        "eldr_serve.pipeline.prefill.split_prefill",
        "if not context.answer.num_tokens:\n                    raise",
        "raise",
    ),
    Mutation(
        "a prompt that fails stays in the queue for prefill",
        "eldr_serve.pipeline.prefill.split_prefill",
        "        finally:\n            self._admission.queues.leave(ticket)",
        "        finally:\n            pass",
    ),
    Mutation(
        "a signature that nobody waits for is still awaited",
        "eldr_serve.fleet.measured_counts",
        "asyncio.get_running_loop().call_later(_MAX_DELAY_S, self._call.cancel)",
    ),
    Mutation(
        "a replica that fails again and again is not ejected",
        "eldr_serve.fleet.outliers",
        "if record.failures < FAILURES:",
        "if True:",
    ),
    # -- the router's client
    Mutation(
        "the end of a lease is not sent to the router",
        "eldr_serve.router_client.client",
        "call.close(lease.generated_tokens if is_complete else 0)",
    ),
    Mutation(
        "a request that is cancelled before its lease comes is not released",
        "eldr_serve.router_client.client",
        "self.release(request.request_id, is_complete=False)  # it may be queued or hold a lease by now",
        "self.leases.pop(request.request_id, None)",
    ),
    Mutation(
        "a request waits for a router that cannot be reached",
        "eldr_serve.router_client.subscription",
        "self._owner.on_router_unreachable()",
    ),
    Mutation(
        "an ingress waits for a router that does not answer",
        "eldr_serve.router_client.waiting",
        'self._on_late(TimeoutError(f"no answer for {self._timeout_s:g} s"))',
    ),
    Mutation(
        "the load of a local fallback is never released",
        "eldr_serve.router_client.client",
        "self._fallback.release(request_id)",
    ),
    Mutation(
        "an ingress that connects again does not send its leases",
        "eldr_serve.router_client.subscription",
        "self._owner.send_leases(leases)",
    ),
    Mutation(
        "the router gets leases by local fallback only when their ingress connects again",
        "eldr_serve.router_client.client",
        "self.send_leases([lease])",
    ),
    Mutation(
        "an event loop waits for GCS while it looks up the router",
        "eldr_serve.router_client.calls",
        "await asyncio.to_thread(self._find)",
        "self._find()",
    ),
    # -- the router
    Mutation(
        "leases of a dead ingress are kept",
        "eldr_serve.router.leases",
        "for request_id in running_ids + queued_ids:",
        "for request_id in queued_ids:",
    ),
    Mutation(
        "the router ignores leases that ingresses made by local fallback",
        "eldr_serve.router.leases",
        "self._placer.adopt_lease(lease)",
    ),
    Mutation(
        "leases that an ingress no longer has are kept when it restores the others",
        "eldr_serve.router.state",
        "self.leases.finish_requests_of(message.ingress, keep=set(message.leases))",
    ),
    Mutation(
        "an ingress that is lost for good is not dropped",
        "eldr_serve.router.ingress_calls",
        "asyncio.get_running_loop().call_later(self._grace_s, self._drop_ingress, subscription)",
    ),
    Mutation(
        "the router still reads a connection that its ingress has left",
        "eldr_serve.router.ingress_calls",
        'previous.reply.peer.close("its ingress has connected again")',
    ),
    Mutation(
        "a cancelled request stays in the decode queue",
        "eldr_serve.scheduling.decode_queue",
        "lease = self.leases.pop(request_id, None)",
        "lease = None",
    ),
    Mutation(
        "prefixes of workers that have gone are remembered",
        "eldr_serve.scheduling.worker_set",
        "self.prefixes.keep_only(self.positions)",
    ),
    Mutation(
        "prompt tokens of a request that has gone are still to be computed",
        "eldr_serve.scheduling.ledger",
        "        self._remove_prefill(request_id)\n        entry = self._requests.pop",
        "        entry = self._requests.pop",
    ),
    # -- engines' servers
    Mutation(
        "an engine's event loop waits for GCS",
        "eldr_serve.replicas.decode_reporter",
        "await asyncio.to_thread(find_actor, self._router_name)",
        "find_actor(self._router_name)",
    ),
    Mutation("an engine that leaves cuts streams", "eldr_serve.replicas.servers", "await channel.drain()"),
    # -- the channel
    Mutation(
        "calls of a lost channel do not end",
        "eldr_serve.channel.client",
        "call.on_ended(ChannelLostError(reason, silent=self._silent))",
    ),
    Mutation("an engine ignores a cancel", "eldr_serve.channel.server", "self._calls[call].cancel()"),
    Mutation(
        "the router ignores that a call is closed",
        "eldr_serve.channel.server",
        "self._open_calls.pop(call).on_close(tokens)",
        "self._open_calls.pop(call)",
    ),
    Mutation("the router ignores that a channel is lost", "eldr_serve.channel.server", "handler.on_lost()"),
    Mutation(
        "calls of a dead ingress run on",
        "eldr_serve.channel.server",
        "        for task in calls.values():\n            task.cancel()\n",
        "",
    ),
    Mutation("a silent channel stays open", "eldr_serve.channel.peer", "if now_s >= lost_at_s:", "if False:"),
    # -- admission and tenants
    Mutation(
        "a place of a tenant is not released",
        "eldr_serve.limits.concurrency",
        "self._permits[tenant.name] -= 1",
    ),
    Mutation(
        "the first request goes first, however many places its tenant has",
        "eldr_serve.limits.concurrency",
        "min(self._waiting, key=lambda t: next_share(self._permits[t.name], t.priority))",
        "next(iter(self._waiting))",
    ),
    Mutation(
        "the usage of tenants at other ingresses does not count",
        "eldr_serve.limits.tenants",
        "tenant.requests.add_usage(charged[0] - last_charged[0])",
    ),
    Mutation(
        "the usage of tenants is not sent to other ingresses",
        "eldr_serve.limits.tenants",
        "return {name: item[1] for name, item in self._usage.items() if name != ingress}",
        "return {}",
    ),
    Mutation("a place is not released", "eldr_serve.limits.concurrency", "self.in_flight -= 1"),
    Mutation(
        "a client that leaves is not noticed",
        "eldr_serve.ingress.admission",
        "answering.cancel()  # this has no effect on a task that is done",
    ),
)


class _Loader(SourceFileLoader):
    mutation: Mutation

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        number = source.count(self.mutation.old)
        if number != 1:
            raise ValueError(f"mutation {self.mutation.name!r}: its text occurs {number} times in {fullname}")
        return compile(source.replace(self.mutation.old, self.mutation.new), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._mutation.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin)
        spec.loader.mutation = self._mutation
        return spec


@dataclass(frozen=True)
class Detection:
    """The result of the search for one mutation.

    Attributes:
        mutation: name of the mutation.
        seed: the first seed that detected it; None if no seed did.
        violation: the first violation of that run; "" if no seed detected it.
    """

    mutation: str
    seed: int | None
    violation: str


def detect(mutation: Mutation, seeds: int) -> Detection:
    """Run seeds until one fails with the mutation and passes without it.

    Call this function in its own process, since it imports the serving code twice.
    """
    unchanged = _import_again()
    sys.meta_path.insert(0, _Finder(mutation))
    mutated = _import_again()
    for seed in range(seeds):
        violations = _run_seed(mutated, seed)
        if violations and not _run_seed(unchanged, seed):
            return Detection(mutation.name, seed, violations[0])
    return Detection(mutation.name, None, "")


def _run_seed(modules: dict[str, ModuleType], seed: int) -> list[str]:
    """Run a seed with these modules and return its violations."""
    sys.modules.update(modules)  # pickle finds classes by the names of modules
    violations: list[str] = modules[_SIMULATE].run_seed(seed).violations
    return violations


_SIMULATE = "tests.faults.simulate"


def _serving_modules() -> dict[str, ModuleType]:
    """Return the imported modules of the serving code and of the harness, except this one."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name.startswith(("eldr_serve", "tests.faults")) and name != __name__
    }


def _import_again() -> dict[str, ModuleType]:
    """Import `simulate` and all the serving code again, and return the modules."""
    for name in _serving_modules():
        del sys.modules[name]
    importlib.import_module(_SIMULATE)
    return _serving_modules()


def _send_detection(mutation: Mutation, seeds: int, sender: Connection) -> None:
    sender.send(detect(mutation, seeds))


def search(mutations: list[Mutation], seeds: int, processes: int) -> Iterator[Detection]:
    """Search each mutation in its own process, and yield the results as they come.

    Args:
        seeds: number of seeds to run for a mutation that none of them detects.
        processes: number of processes at a time.

    No process is started while the caller handles a result, as threads of a pool would do. Such a process
    would inherit the pipes of any program that the caller starts, and this program would then wait until the
    process ends.
    """
    _import_again()  # this imports once what the serving code imports
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(mutations))
    running: dict[Connection, tuple[Mutation, BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            mutation = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send_detection, args=(mutation, seeds, sender))
            process.start()
            sender.close()
            running[receiver] = mutation, process
        ready = wait(list(running))
        for receiver in [one for one in running if one in ready]:
            mutation, ended = running.pop(receiver)
            try:
                detection: Detection = receiver.recv()
            except EOFError:
                raise RuntimeError(f"the process of mutation {mutation.name!r} has failed") from None
            ended.join()
            yield detection
