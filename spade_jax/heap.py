"""Has the C library keep the memory that is freed, for the next program that runs on a CPU.

Each call of a compiled program takes gigabytes and gives them back; the system then clears every
page again, which cost a learner's step 8% (`docs/measurements.md`). Linux with glibc only: others
keep their ways. The memory of the process stays at its peak. Standard library only, and it has to
be called before jax has started its threads.
"""

import ctypes
import os
import sys

# From <malloc.h>: threads get no heaps of their own, since these can only be mapped in pieces;
# nothing is mapped apart; the end of the heap is never given back.
_SETTINGS = {"arena_max": (-8, 1), "mmap_max": (-4, 0), "trim_threshold": (-1, -1)}


def keep_freed_memory() -> bool:
    """Do so where the run is on a CPU, as JAX_PLATFORMS tells; say whether it was done.

    Whoever sets GLIBC_TUNABLES has decided this already.
    """
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if not on_cpu or sys.platform != "linux" or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # another C library's mallopt does nothing
        return False
    return all(library.mallopt(name, value) for name, value in _SETTINGS.values())
