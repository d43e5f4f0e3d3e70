"""Full collections while many objects come to live, as when thousands of streams begin."""

import subprocess
import sys

import pytest

_COUNT = """
import gc
from eldr_serve.ingress.garbage_collection import make_full_collections_rare

gc.set_threshold(700, 10, 10)  # Python's defaults
{call}
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
objects = [[] for _ in range(600_000)]
print(len(full))
"""


@pytest.mark.parametrize(("call", "is_rare"), [("make_full_collections_rare()", True), ("", False)])
def test_many_live_objects_cause_no_full_collection(call: str, is_rare: bool) -> None:
    script = _COUNT.format(call=call)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (int(done.stdout) == 0) is is_rare
