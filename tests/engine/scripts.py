"""Engines that run as scripts in their own processes, since vLLM starts once per process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from tests.support.cpu_features import limited_to

ROOT = Path(__file__).parents[2]
ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # compiling parts of vLLM's sampler takes longer than a test
}
TRITON_CPU = ROOT / "benchmarks/lib/triton_cpu"


_FORKED = get_context("forkserver")
_FORKED.set_forkserver_preload(["vllm.v1.engine.llm_engine"])  # it is imported once, not by every script


def run_script(name: str, *arguments: object, v2: bool = False, cpu: str = "", **env: str) -> None:
    """Run a script of this folder. On failure, raise an error with the end of its output.

    Args:
        name: file name of the script.
        arguments: its arguments.
        v2: whether to use Model Runner V2.
        cpu: best CPU feature that the script sees (`cpu_features.limited_to`); all features by default.
        env: additional environment variables.
    """
    script = [str(Path(__file__).with_name(name)), *map(str, arguments)]
    if v2 or cpu:  # the fork server has imported vLLM without these settings
        folders = [str(TRITON_CPU) if v2 else "", str(ROOT), os.environ.get("PYTHONPATH", "")]
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
        if v2:
            env |= {"TRITON_INTERPRET": "1"}
        if cpu:
            env |= limited_to(cpu, os.environ | env)
        done = subprocess.run(
            [sys.executable, *script],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            env=os.environ | ENGINE_ENV | env,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return
    with tempfile.NamedTemporaryFile() as output:
        with mock.patch.dict(os.environ, ENGINE_ENV):
            process = _FORKED.Process(target=_script, args=(script, env, output.name))
            process.start()
        process.join(400)
        process.kill()
        process.join()
        assert process.exitcode == 0, output.read().decode()[-6000:]


def _script(script: list[str], env: dict[str, str], output: str) -> None:
    os.environ |= env
    file = os.open(output, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.path.insert(0, str(ROOT))
    sys.argv = script
    runpy.run_path(script[0], run_name="__main__")
