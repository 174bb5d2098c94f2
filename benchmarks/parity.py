"""Whether a converted checkpoint is the model that transformers runs: greedy tokens and logits.

    python benchmarks/parity.py peer SOURCE peer.npz   # torch, transformers, accelerate, gguf
    spade-jax convert SOURCE CONVERTED
    python benchmarks/parity.py ours CONVERTED peer.npz

    python benchmarks/parity.py same ONE OTHER         # torch, transformers

SOURCE is a Hugging Face folder or a GGUF file. The first and the last command need an environment
with torch and transformers (measured with 2.13.0 and 5.24.0, on CPU), which are no dependencies.
The first writes 64 greedy tokens for each of ten prompts, and logits at eight of the positions. The
second runs our forward over prompt and continuation in float32: where its best token is the next
one at every position, greedy decoding gives the same 64 tokens, one after the other. The last says
whether transformers gives the same logits, to the bit, from two folders: a checkpoint and its
export.
"""

import json
import sys
from pathlib import Path

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
        "goals": {
            "greedy tokens equal": same == NEW_TOKENS * len(PROMPTS),
            "logits within 1e-3": worst < 1e-3,
        },
    }
    print(json.dumps(result, indent=2))


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
    print(json.dumps({"folders": [str(one), str(other)], "equal": torch.equal(first, second)}))


if __name__ == "__main__":
    commands = {"peer": peer, "ours": ours, "same": same}
    if len(sys.argv) != 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
