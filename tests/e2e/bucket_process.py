"""One process of a run in the bucket of the test that started it; the arguments are those of
`train`.
"""

import logging
import sys

import pytest
from bucket_stand_in import shared_bucket_store

from spade_jax import cli

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        shared_bucket_store(monkeypatch)
        logging.root.handlers.clear()  # of what the stand-in imports; `main` has its own
        sys.exit(cli.main(["train", *sys.argv[1:]]))
