"""An event loop on virtual time that runs several processes, which can be killed and stopped.

A process is a context variable that its callbacks and tasks inherit. After a kill nothing of the process runs
again, not even a `finally`. While a process is stopped, its callbacks that are due wait.

Time advances only when all processes wait: then it jumps to the next timer, so minutes of leases and silence
cost milliseconds. A random generator chooses which of the ready processes runs next, so one seed gives one
run.

One thing is real: the CPU time of each callback. A callback that computes for more than STALL_S is an error,
since it blocks the event loop of its process, so on a slow enough machine more callbacks are errors. The time
changes neither the order of a run nor its virtual times.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import random
import sys
import time
import weakref
from asyncio import events
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

from eldr_serve.metrics import STALL_S

_MAX_STEPS = 3_000_000  # maximum steps of one run, beyond which it is a livelock

_process: ContextVar[Process] = ContextVar("process")


class LivelockError(RuntimeError):
    """The run does not end."""


class Process:
    """A unit that can be killed or stopped.

    Attributes:
        name: role and number, such as "decode-2".
        alive: whether it runs or is stopped. A kill ends that.
        stopped: whether it is stopped, as by SIGSTOP.
        servable_object: the deployment that runs in it. Ray Serve's context uses the same name.
        steps: number of callbacks, including steps of tasks, that it has run.
        ready: callbacks that are due.
        tasks: tasks that have not ended, in order of their creation.
    """

    def __init__(self, loop: VirtualLoop, name: str, number: int) -> None:
        self.name = name
        self.loop = loop
        self.number = number
        self.alive = True
        self.stopped = False
        self.servable_object: Any = None
        self.steps = 0
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self._traps: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)  # step -> callbacks
        self.context = copy_context()
        self.context.run(_process.set, self)

    def __repr__(self) -> str:
        return self.name

    def run(self, begin: Callable[..., Any], *args: Any) -> Any:
        """Call `begin` in the context of this process."""
        return self.context.copy().run(begin, *args)

    def soon(self, callback: Callable[..., Any], *args: Any, after_s: float = 0.0) -> asyncio.TimerHandle:
        """Schedule a callback in this process."""
        return self.loop.call_later(after_s, callback, *args, context=self.context.copy())

    def trap(self, after_steps: int, callback: Callable[[], None]) -> None:
        """Call `callback` after so many further steps of the process."""
        self._traps[self.steps + max(after_steps, 1)].append(callback)

    def count_step(self) -> None:
        """Count a step, and call what was to be called after it, in the order of the calls of `trap`."""
        self.steps += 1
        for callback in self._traps.pop(self.steps, ()):
            callback()

    @property
    def pending(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that have not ended."""
        return [task for task in self.tasks if not task.done()]


def current() -> Process:
    """Return the process that is running."""
    return _process.get()


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop that the module's docstring describes.

    Attributes:
        processes: all processes, of which the first is that of `run`'s coroutine.
        network: a `virtual_network.Network`, which carries all connections.
        thread_s: draws the seconds of a call in a thread.
        in_thread: whether such a call is running.
        errors: uncaught exceptions, which asyncio would have logged, and blocked event loops.
        trace: hash of the sequence of steps, equal for equal runs.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Context]] = []
        self._numbers = itertools.count()
        self._runnable: dict[Process, None] = {}
        self._steps = 0
        self._generators: weakref.WeakKeyDictionary[Any, Process] = weakref.WeakKeyDictionary()
        self._over = False
        self.processes: list[Process] = []
        self.errors: list[str] = []
        self.network: Any = None
        self.thread_s: Callable[[], float] = lambda: 0.001
        self.in_thread = False
        self.trace = 0

    def process(self, name: str) -> Process:
        """Create a process."""
        process = Process(self, name, len(self.processes))
        self.processes.append(process)
        return process

    def kill(self, process: Process) -> None:
        """Kill a process, as SIGKILL does."""
        process.alive = False
        process.ready.clear()
        self._runnable.pop(process, None)

    def stop_process(self, process: Process) -> None:
        """Stop a process, as SIGSTOP does."""
        process.stopped = True
        self._runnable.pop(process, None)

    def go_on(self, process: Process) -> None:
        """Continue a process, as SIGCONT does."""
        process.stopped = False
        if process.alive and process.ready:
            self._runnable[process] = None

    # -- what asyncio asks of a loop -------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._make_ready(handle, context)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer, context))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        if self._over:
            coro.close()
            return self.create_future()  # type: ignore[return-value]
        context = copy_context() if context is None else context
        process = context[_process]
        task = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        process.tasks[task] = None
        task.add_done_callback(process.tasks.pop, context=context)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        result = self.create_future()

        def run() -> None:
            if result.done():
                return
            self.in_thread = True
            try:
                result.set_result(func(*args))
            except Exception as error:
                result.set_exception(error)
            finally:
                self.in_thread = False

        self.call_later(self.thread_s(), run)
        return result

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None) -> Any:  # type: ignore[override]
        return await self.network.connect(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.network.listen(protocol_factory, host)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._over:
            self.errors.append(f"uncaught: {context.get('message')}: {context.get('exception')!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    # -- running ---------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run `main` in its own process and return its result. At its end all processes end."""
        process = self.process("harness")
        hooks = sys.get_asyncgen_hooks()
        running = events._get_running_loop()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(firstiter=self._register_generator, finalizer=self._close_generator)
        try:
            task = process.run(self.create_task, main)
            while not task.done():
                self._turn()
            return task.result()
        finally:
            self._close_tasks()
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(running)

    def _turn(self) -> None:
        """Run one turn of a random process that is ready. Advance to the next timers if none is."""
        if not self._runnable:
            self._advance_time()
            return
        runnable = list(self._runnable)
        process = runnable[int(self._rng.random() * len(runnable))]
        ready = process.ready
        for _ in range(len(ready)):
            if not ready or process.stopped:  # its last step has killed or stopped it
                break
            handle = ready.popleft()
            if not handle.cancelled():
                start_s = time.thread_time()
                handle._run()
                if time.thread_time() - start_s > STALL_S:
                    self.errors.append(f"the event loop of {process} was blocked in {handle}")
                self._steps += 1
                process.count_step()
        if not ready or process.stopped:
            self._runnable.pop(process, None)
        self.trace = hash((self.trace, process.number, process.steps, self._now))
        if self._steps > _MAX_STEPS:
            raise LivelockError(f"{self._steps} steps, and {self._now:.1f} s of virtual time")

    def _advance_time(self) -> None:
        """Advance to the next timers and make their callbacks ready."""
        if not self._timers:
            raise LivelockError("all processes wait, and no timer is left")
        self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            _, _, timer, context = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._make_ready(timer, context)

    def _make_ready(self, handle: asyncio.Handle, context: Context) -> None:
        if self._over:
            return
        process = context[_process]
        if process.alive:
            process.ready.append(handle)
            if not process.stopped:
                self._runnable[process] = None

    def _register_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators[generator] = current()

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        process = self._generators.get(generator)
        if process is not None and process.alive and not self._over:
            process.run(self.create_task, generator.aclose())

    def _close_tasks(self) -> None:
        """Close all tasks that are left, without letting them do anything."""
        self._over = True
        for process in self.processes:
            for task in process.pending:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                assert coroutine is not None
                with contextlib.suppress(BaseException):
                    process.run(coroutine.close)
        self._timers.clear()
        gc.collect()  # objects that this finalizes find a loop that does nothing
