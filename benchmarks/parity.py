"""Whether a converted checkpoint is the model that transformers runs: greedy tokens and logits.

    python benchmarks/parity.py peer SOURCE peer.npz   # torch, transformers, accelerate, gguf
    spade-jax convert SOURCE CONVERTED
    python benchmarks/parity.py ours CONVERTED peer.npz
    python benchmarks/parity.py engine CONVERTED peer.npz

    python benchmarks/parity.py same ONE OTHER         # torch, transformers

SOURCE is a Hugging Face folder or a GGUF file. The first and the last command need an environment
with torch and transformers (measured with 2.13.0 and 5.24.0, on CPU), which are no dependencies.
The first writes 64 greedy tokens for each of ten prompts, and logits at eight of the positions. The
second runs our forward over prompt and continuation in float32: where its best token is the next
one at every position, greedy decoding gives the same 64 tokens, one after the other. The third lets
the sampler itself decode greedily, each prompt alone and then all of them with 22 sampled
neighbours, and compares its log-probabilities with those of our forward. The last says
whether transformers gives the same logits, to the bit, from two folders: a checkpoint and its
export.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

NEW_TOKENS = 64
KEPT = range(0, NEW_TOKENS, 8)  # positions whose logits are compared
PROMPTS = (
    "The three largest rivers of Europe are",
    "def fibonacci(n):\n    ",
    "To bake bread you need flour, water,",
    "Question: what is 17 + 25?\nAnswer:",
    "In the year 1969, the first",
    "<|im_start|>user\nName a prime number.<|im_end|>\n<|im_start|>assistant\n",
    "class Stack:\n    def __init__(self):\n",
    "Es war einmal ein K\u00f6nig,",
    "Once upon a time there was a small robot who",
    "The derivative of x**3 is",
)


def peer(source: Path, out: Path) -> None:
    """Run transformers."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]

    where, options = str(source), {}
    if source.is_file():
        where, options = str(source.parent), {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options).eval()
    prompts = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in PROMPTS]
    width = max(map(len, prompts))
    batch = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    written = model.generate(
        batch,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )
    arrays = {}
    for index, ids in enumerate(prompts):
        tokens, start = written[index, width - len(ids) :], len(ids) - 1
        with torch.no_grad():  # without padding, for the logits
            hidden = model.model(tokens[None], use_cache=False).last_hidden_state[0]
            logits = model.lm_head(hidden[[start + kept for kept in KEPT]])
        arrays[f"tokens.{index}"] = tokens.numpy().astype(np.int32)
        arrays[f"start.{index}"] = np.int32(start)
        arrays[f"logits.{index}"] = logits.numpy()
        print(repr(tokenizer.decode(tokens)[:100]), flush=True)
    np.savez(out, **arrays)


def ours(folder: Path, found: Path) -> None:
    """Run our forward over what transformers wrote, and print the comparison."""
    import jax
    import jax.numpy as jnp

    from models.config import read_config
    from models.transformer import forward, logits
    from models.weights import load_weights

    config = read_config(folder)
    params = load_weights(folder, config)
    peers = np.load(found)
    rows = [peers[f"tokens.{index}"] for index in range(len(PROMPTS))]
    width = max(len(row) for row in rows)

    @jax.jit
    def run(params, tokens, segments):
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
        hidden = forward(config, params, tokens, positions, segment_ids=segments).hidden
        return logits(config, params, hidden)

    same, worst, margin = 0, 0.0, np.inf
    for index, row in enumerate(rows):  # one at a time: the logits of all rows are large
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(row)] = row
        segments = (np.arange(width) < len(row)).astype(np.int32)[None]
        scores = np.asarray(run(params, jnp.asarray(tokens), jnp.asarray(segments)))[0]
        start = int(peers[f"start.{index}"])
        span = scores[start : start + NEW_TOKENS]
        same += int((span.argmax(axis=-1) == row[start + 1 :]).sum())
        best = np.sort(np.partition(span, -2, axis=-1)[:, -2:], axis=-1)
        margin = min(margin, float((best[:, 1] - best[:, 0]).min()))
        difference = np.abs(span[list(KEPT)] - peers[f"logits.{index}"])
        worst = max(worst, float(difference.max()))
    result = {
        "checkpoint": folder.name,
        "family": config.family,
        "greedy_tokens_equal": same,
        "greedy_tokens": NEW_TOKENS * len(PROMPTS),
        "logit_difference_max": worst,
        "smallest_margin_of_best_token": margin,
    }
    print(json.dumps(result, indent=2))
    count = NEW_TOKENS * len(PROMPTS)
    say_goals(
        ("greedy_tokens_equal", same, count, same == count),
        ("logit_difference_max", worst, 1e-3, worst < 1e-3),
    )


def engine(folder: Path, found: Path) -> None:
    """Decode with the sampler, alone and among 31 neighbours, and print the comparison."""
    import asyncio

    import jax

    from models.config import read_config
    from models.execution import PLAIN
    from models.sharding import build_mesh
    from models.weights import load_weights
    from spade_jax.engine_config import EngineConfig
    from spade_jax.rollout.engine import Engine
    from spade_jax.types import SamplingParams

    config = read_config(folder)
    peers = np.load(found)
    rows = [peers[f"tokens.{index}"] for index in range(len(PROMPTS))]
    starts = [int(peers[f"start.{index}"]) + 1 for index in range(len(PROMPTS))]
    mesh = build_mesh(1, 1, 1, 1, jax.devices()[:1])
    params = load_weights(folder, config, mesh)
    settings = EngineConfig(slots=32, queue=0, context_tokens=256, prefill_tokens=128)
    sampler = Engine(config, settings, mesh, PLAIN)
    sampler.compile()
    sampler.load(params, 0)
    greedy = SamplingParams(0.0, NEW_TOKENS, ())
    warm = SamplingParams(1.0, NEW_TOKENS, (), top_p=0.9)
    rng = np.random.default_rng(0)
    neighbours = [
        sampler.generate(rng.integers(0, config.vocab_size, 12 + i).astype(np.int32), warm, key)
        for i, key in enumerate(jax.random.split(jax.random.key(1), 32 - len(rows)))
    ]

    def ask(index: int):
        return sampler.generate(rows[index][: starts[index]], greedy, jax.random.key(index))

    alone = [asyncio.run(sampler.gather([ask(index)]))[0] for index in range(len(rows))]
    sampler.load(params, 0)  # forgets the pages
    among = asyncio.run(sampler.gather([*map(ask, range(len(rows))), *neighbours]))[: len(rows)]
    expected = [row[start:] for row, start in zip(rows, starts, strict=True)]
    bits = all(
        np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)
        for one, other in zip(alone, among, strict=True)
    )
    gaps = _learner_gaps(config, params, rows, starts, [each.logprobs for each in among])
    count = NEW_TOKENS * len(rows)
    same = [
        sum(
            int((each.tokens == tokens).sum())
            for each, tokens in zip(results, expected, strict=True)
        )
        for results in (alone, among)
    ]
    result = {
        "checkpoint": folder.name,
        "greedy_tokens": count,
        "equal_alone": same[0],
        "equal_among_31_neighbours": same[1],
        "alone_and_among_equal_to_the_bit": bits,
        "sampler_learner_logprob_gap": {"mean": float(gaps.mean()), "max": float(gaps.max())},
        "late_compiles": sampler.stats().late_compiles,
    }
    print(json.dumps(result, indent=2))
    mean, largest = float(gaps.mean()), float(gaps.max())
    say_goals(
        ("greedy_tokens_equal_alone", same[0], count, same[0] == count),
        ("greedy_tokens_equal_among_neighbours", same[1], count, same[1] == count),
        ("alone_and_among_equal_to_the_bit", bits, True, bits),
        ("gap_mean", mean, 1e-5, mean <= 1e-5),
        ("gap_max", largest, 2e-4, largest <= 2e-4),
    )


def say_goals(*goals: tuple[str, Any, Any, bool]) -> None:
    """Print the last line."""
    names = ("name", "value", "goal", "holds")
    print(json.dumps({"goals": [dict(zip(names, goal, strict=True)) for goal in goals]}))


def _learner_gaps(config, params, rows, starts, logprobs) -> np.ndarray:
    """Differences of the sampler's log-probabilities from those of the forward that trains."""
    import jax
    import jax.numpy as jnp

    from models.transformer import forward, logits

    width = max(map(len, rows))

    @jax.jit
    def run(tokens, segments):
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
        hidden = forward(config, params, tokens, positions, segment_ids=segments).hidden
        return jax.nn.log_softmax(logits(config, params, hidden))

    gaps = []
    for row, start, found in zip(rows, starts, logprobs, strict=True):
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(row)] = row
        segments = (np.arange(width) < len(row)).astype(np.int32)[None]
        scores = np.asarray(run(tokens, segments))[0]
        after = np.arange(start - 1, len(row) - 1)
        gaps.append(np.abs(scores[after, row[start:]] - found))
    return np.concatenate(gaps)


def same(one: Path, other: Path) -> None:
    """Compare what transformers computes from two folders."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    tokens = torch.arange(48)[None]
    with torch.no_grad():
        first, second = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
            for folder in (one, other)
        )
    equal = torch.equal(first, second)
    print(json.dumps({"folders": [str(one), str(other)], "equal": equal}))
    say_goals(("logits_equal", equal, True, equal))


if __name__ == "__main__":
    commands = {"peer": peer, "ours": ours, "engine": engine, "same": same}
    if len(sys.argv) != 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
