"""A trace of a few steps by jax's profiler, for XProf or Perfetto.

It starts with the second step of the process, when all programs of the loop are compiled, and holds
what this process and its devices did. Reading it is left to those tools.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


def traced(steps: range, count: int, folder: Path) -> Iterator[int]:
    """Yield the steps, the second to the `count + 1`st of them under the profiler (0: none).

    Of a single step that one is traced, compiling included.
    """
    wanted = steps[1 : 1 + count] if len(steps) > 1 else steps[:count]
    with contextlib.ExitStack() as stack:
        for step in steps:
            if wanted and step == wanted[0]:
                logger.info("profiling the steps %d to %d", wanted[0] + 1, wanted[-1] + 1)
                stack.enter_context(jax.profiler.trace(str(folder), create_perfetto_trace=True))
            yield step
            if wanted and step == wanted[-1]:
                stack.close()
                logger.info("the profile is in %s", folder)
