"""Makes tests/models/golden/: tiny random models of every family, and what transformers makes of
them.

Run by hand, with torch and transformers, which the project does not depend on (made with torch
2.13.0 and transformers 5.24.0, on CPU):

    python tests/models/make_golden.py

Each folder is a checkpoint as `save_pretrained` writes it, with a stand-in for its tokenizer, and
golden.npz: tokens, segments and positions of packed rows with padding, the logits of each segment,
which transformers computes on its own, and the gradient of the loss by every tensor. Positions jump
past 4k and past 12k within segments.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

GOLDEN = Path(__file__).parent / "golden"
VOCAB = 64
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
MOE = {
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rms_norm_eps": 1e-5}),
    "llama3": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": LLAMA3},
    ),
    "llama_linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, MOE | {"norm_topk_prob": True}),
    "qwen3_moe_raw": (Qwen3MoeConfig, Qwen3MoeForCausalLM, MOE | {"norm_topk_prob": False}),
}

# Each row: segments as (tokens, positions); what is left of 40 tokens is padding.
ROWS = [
    [[*range(0, 9), *range(4090, 4101)], list(range(0, 14))],
    [list(range(12_000, 12_011)), [0, 5, 4500, 4501, 9000, 9001, 30_000], list(range(3))],
    [list(range(5000, 5040))],
]
WIDTH = 40


def make_rows(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return tokens, segment ids and positions of packed rows."""
    shape = (len(ROWS), WIDTH)
    rows = {
        "tokens": rng.integers(0, VOCAB, shape).astype(np.int32),
        "segments": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
    }
    for row, segments in enumerate(ROWS):
        start = 0
        for index, positions in enumerate(segments, 1):
            end = start + len(positions)
            rows["segments"][row, start:end] = index
            rows["positions"][row, start:end] = positions
            start = end
    return rows


def random_model(name: str) -> torch.nn.Module:
    """Return a model whose every parameter matters: no norm is one and no bias is zero."""
    make_config, make_model, changes = MODELS[name]
    model = make_model(make_config(**(BASE | changes))).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in key else 0.25 * noise)
    return model


def evaluate(model: torch.nn.Module, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return logits, loss and gradients; each segment is a call of its own."""
    logits = np.zeros((*rows["tokens"].shape, VOCAB), np.float32)
    loss, count = torch.zeros(()), 0
    for row, segments in enumerate(rows["segments"]):
        for segment in range(1, segments.max() + 1):
            own = np.flatnonzero(segments == segment)
            tokens = torch.tensor(rows["tokens"][row, own], dtype=torch.long)[None]
            positions = torch.tensor(rows["positions"][row, own], dtype=torch.long)[None]
            # The mask keeps transformers from taking a jump in positions for a new sequence.
            output = model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
            ).logits
            logits[row, own] = output[0].detach().numpy()
            scores = torch.log_softmax(output[0, :-1], dim=-1)
            loss = loss - scores[torch.arange(len(own) - 1), tokens[0, 1:]].sum()
            count += len(own) - 1
    (loss / count).backward()
    return {"logits": logits, "loss": np.float32(loss.item() / count)}


def gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return gradients under the names in the file, where experts are tensors of their own."""
    found = {}
    for key, parameter in model.named_parameters():
        grad = parameter.grad.numpy()
        if key.endswith("experts.gate_up_proj"):
            for expert, value in enumerate(grad):
                for name, half in zip(("gate", "up"), np.split(value, 2), strict=True):
                    found[key.replace("gate_up_proj", f"{expert}.{name}_proj.weight")] = half
        elif key.endswith("experts.down_proj"):
            for expert, value in enumerate(grad):
                found[key.replace("down_proj", f"{expert}.down_proj.weight")] = value
        else:
            found[key] = grad
    return {f"grad.{key}": value for key, value in found.items()}


def main() -> None:
    """Make every folder anew."""
    for name in MODELS:
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        model = random_model(name)
        # Several shards in one of them, so that the index is read as well.
        size = "20KB" if name == "qwen3" else "5GB"
        model.save_pretrained(folder, max_shard_size=size)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokenizer = {"model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(26)}}}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
        rows = make_rows(np.random.default_rng(7))
        values = rows | evaluate(model, rows)
        np.savez_compressed(folder / "golden.npz", **values, **gradients(model))
        total = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name}: {total / 1000:.0f} kB, loss {values['loss']:.3f}")


if __name__ == "__main__":
    main()
