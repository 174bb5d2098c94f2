"""The options of `spade-jax plan`, and what has to be set before jax is imported."""

import argparse
import os

from spade_jax.errors import ConfigError
from spade_jax.plan import topology

DETAILS = """\
CONFIG is a config file, and --section.field value changes it, as for spade-jax train; try
--mesh.tensor, --batch.device-tokens, --engine.kv-tokens, --learner.optimizer-memory.

--topology is one of
  v5p:4x4x4   a Cloud TPU slice (v4, v5e, v5p, v6e) by its shape; needs the extra tpu, no TPU
  h200:8      NVIDIA GPUs (h100, h200), at most eight to a host; needs the extra cuda, no GPU
  local       what jax finds on this machine

Every program of the run is compiled for it, one after the other: seconds each for GPUs and a small
model, minutes for a large one on TPU. The learner has all chips, as mesh.* says. The sampler of one
host has the same mesh; of several hosts each has a sampler of its own on its own chips. Printed are
the memory of a chip in each phase by purpose, and a step's time at the peak rates and as expected.

Exit codes: 0 it fits with 8% of a chip's memory to spare, 1 it does not, 2 bad input.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("--topology", required=True, metavar="NAME", help="which devices")
    parser.add_argument(
        "--episode-tokens",
        type=int,
        metavar="N",
        help="mean length of an episode (default: a quarter of the context)",
    )
    parser.add_argument(
        "--utilisation",
        type=float,
        default=0.4,
        metavar="SHARE",
        help="of the chips' peak rates, that is reached (default: 0.4)",
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print it all as JSON")


def prepare(options: argparse.Namespace) -> None:
    """Check the options, and let jax compile for the topology; before jax is imported.

    Raises:
        ConfigError: an option cannot be.
    """
    if options.episode_tokens is not None and options.episode_tokens < 16:
        raise ConfigError(f"--episode-tokens {options.episode_tokens} must be at least 16")
    if not 0 < options.utilisation <= 1:
        raise ConfigError(f"--utilisation {options.utilisation} must be above 0 and at most 1")
    os.environ.update(topology.environment(options.topology))
