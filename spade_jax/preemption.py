"""Notice that a cloud is about to take this machine, which a thread asks for.

On Google's spot machines the metadata server says TRUE at `computeMetadata/v1/instance/preempted`
once the machine is given up, up to 30 s before it is gone. Nothing is asked unless
`run.preemption_url` names such an address. A notice becomes SIGTERM in this process, so what is
done about it is `stopping`'s. Maintenance is not asked for: it is announced long before, and a run
that stopped and was started again would stop again and again until it comes.
"""

import _thread
import http.client
import logging
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

ASK_S = 1.0  # between two questions
ANSWER_S = 5.0  # for an answer


@contextmanager
def noticed(url: str) -> Iterator[None]:
    """Raise SIGTERM in the main thread at a notice while in the block; no address: never."""
    ended = threading.Event()
    if url:
        asking = threading.Thread(
            target=_ask, args=(url, ended), name="preemption notice", daemon=True
        )
        asking.start()
    try:
        yield
    finally:
        ended.set()  # not waited for: an answer under way finds no handler, and is dropped


def _ask(url: str, ended: threading.Event) -> None:
    # A proxy has no part in what a machine says of itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    answered = True
    while not ended.wait(ASK_S):
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                text = answer.read(100).decode(errors="replace").strip()
            if text not in ("TRUE", "FALSE"):
                raise ValueError(f"it says {text!r}; expected TRUE or FALSE")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if answered:
                logger.warning(
                    "no notice of a preemption can be had from %s (%s); it is asked again every "
                    "%.0f s",
                    url,
                    error,
                    ASK_S,
                )
            answered = False
            continue
        answered = True
        if text == "TRUE":
            logger.warning("this machine is about to be taken: the run stops and saves")
            # As a signal would; one that comes when nobody listens any more does nothing.
            _thread.interrupt_main(signal.SIGTERM)
            return
