"""Memory that is freed and taken again costs no page again, and only where this was asked for."""

import json
import os
import subprocess
import sys

import pytest

LOOK = """
import json, resource
from spade_jax.heap import keep_freed_memory
kept = keep_freed_memory()
import threading
import numpy as np
faults = []

def take(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(count << 20, np.uint8)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

for _ in range(3):
    thread = threading.Thread(target=take, args=[256])  # jax as well takes it in threads
    thread.start()
    thread.join()
print(json.dumps([kept, faults]))
"""


def look(**environment: str) -> tuple[bool, list[int]]:
    given = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**given, "NUMPY_MADVISE_HUGEPAGE": "0", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    kept, faults = json.loads(done.stdout)
    return kept, faults


needs_glibc = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="glibc alone has these settings"
)


@needs_glibc
def test_freed_memory_is_taken_again_without_new_pages():
    kept, (first, second, third) = look(JAX_PLATFORMS="cpu,cuda")
    assert kept and first > 60_000  # 256 MiB in pages of 4 KiB
    assert second < 1_000 and third < 1_000


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"JAX_PLATFORMS": "cuda"},
        {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"},
    ],
)
def test_elsewhere_the_library_keeps_its_ways(environment: dict[str, str]):
    kept, faults = look(**environment)
    assert not kept and min(faults) > 60_000
