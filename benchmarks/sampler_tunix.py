"""A contestant of the sampler benchmark: the JAX sampler of Tunix, on a random Qwen3.

    python benchmarks/sampler_tunix.py SHAPE.json EPISODES.json [--rows 32]

Needs google-tunix; started by `benchmarks/sampler.py`. SHAPE is a model's `config.json` as this
project writes it. The sampler encodes a batch of prompts padded on the left, then decodes until the
longest completion is done; it keeps nothing between calls, so each turn encodes the longer
histories anew. Each turn has a sampler with a cache of just the size that it needs, and everything
is compiled before the first timed run.
"""

import argparse
import dataclasses
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sampler_workload as workload
from flax import nnx
from tunix.generate import sampler as tunix_sampler  # pyright: ignore[reportMissingImports]
from tunix.models.qwen3 import model as qwen3  # pyright: ignore[reportMissingImports]


class Numbers:
    """A tokenizer of texts that are token ids already."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # which Tunix reads as none

    def eos_id(self) -> int:
        return -1  # no token: nothing ends before its length

    def pad_id(self) -> int:
        return 0


class Sampler(tunix_sampler.Sampler):
    """Tunix's sampler, which can be warmed up without decoding to the end."""

    warming = False

    def init_sample_state(self, all_input_ids: jax.Array, **options: Any) -> Any:
        state = super().init_sample_state(all_input_ids, **options)
        if not self.warming:
            return state
        return dataclasses.replace(state, total_sampling_steps=all_input_ids.shape[1] + 1)


def make_model(shape: dict[str, Any]) -> qwen3.Qwen3:
    """A random model of this shape; Tunix's own initial feed-forward weights are all zero."""
    config = qwen3.ModelConfig(
        num_layers=shape["num_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["embed"],
        hidden_dim=shape["mlp"],
        num_heads=shape["num_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_kv_heads"],
        rope_theta=int(shape["rope_theta"]),
        norm_eps=shape["norm_eps"],
        use_tied_embedding=shape["tied_head"],
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def fill(array: jax.Array) -> jax.Array:
        if array.ndim < 2:
            return array
        return jax.numpy.asarray(0.02 * rng.standard_normal(array.shape, np.float32))

    nnx.update(model, jax.tree.map(fill, nnx.state(model, nnx.Param)))
    return model


def main() -> None:
    """Load, compile and serve."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("shape", type=Path)
    parser.add_argument("episodes", type=Path)
    parser.add_argument("--rows", type=int, default=32, help="histories in one call")
    arguments = parser.parse_args()
    shape = json.loads(arguments.shape.read_text())
    episodes = workload.load(arguments.episodes)
    model = make_model(shape)
    samplers: dict[tuple[int, int], Sampler] = {}
    warming = True

    def call(histories: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width, steps = max(map(len, histories)), max(lengths)
        key = (width, steps)
        if key not in samplers:
            cache = tunix_sampler.CacheConfig(
                cache_size=width + steps,
                num_layers=shape["num_layers"],
                num_kv_heads=shape["num_kv_heads"],
                head_dim=shape["head_dim"],
            )
            samplers[key] = Sampler(model, Numbers(), cache)
        samplers[key].warming = warming
        output = samplers[key](
            [" ".join(map(str, history)) for history in histories],
            max_generation_steps=steps,
            max_prompt_length=width,
            temperature=1.0,
            top_p=1.0,
            seed=0,
            eos_tokens=[-1],
        )
        return [tokens.tolist() for tokens in output.tokens]

    def generate(histories: list[list[int]], lengths: list[int]) -> list[list[int]]:
        completions = []
        for start in range(0, len(histories), arguments.rows):
            rows = slice(start, start + arguments.rows)
            completions += call(histories[rows], lengths[rows])
        return completions

    workload.play_in_turns(episodes, generate)
    warming = False
    versions = {name: metadata.version(name) for name in ("google-tunix", "jax")}
    workload.serve(versions, lambda: workload.play_in_turns(episodes, generate))


if __name__ == "__main__":
    main()
