"""A contestant of the learner benchmark: transformers and torch on padded batches.

    python benchmarks/learner_transformers.py SOURCE BATCHES.npz [--threads 2] [--rows 5]

Needs torch, transformers, accelerate and gguf; started by `benchmarks/learner.py`. SOURCE is a
Hugging Face folder or a GGUF file. Trajectories are padded on the right to the longest of their
microbatch; gradients accumulate over microbatches. The log-probabilities of sampled tokens are
taken from the scores of the whole row, a row at a time to spare memory.
"""

import argparse
from pathlib import Path

import learner_workload as workload
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("batches", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source: Path = arguments.source
    where, options = str(source), {}
    if source.is_file():
        where, options = str(source.parent), {"gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float32, attn_implementation="sdpa", **options
    ).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=workload.LR,
        betas=workload.BETAS,
        weight_decay=workload.WEIGHT_DECAY,
    )

    def padded(values, kind) -> torch.Tensor:
        tensors = [torch.tensor(value, dtype=kind) for value in values]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    def update(sampled: list[workload.Sampled]) -> float:
        count = sum(int(one.mask[1:].sum()) for one in sampled)
        total = 0.0
        for start in range(0, len(sampled), arguments.rows):
            part = sampled[start : start + arguments.rows]
            tokens = padded([one.tokens for one in part], torch.long)
            live = padded([[1] * len(one.tokens) for one in part], torch.long)
            mask = padded([one.mask for one in part], torch.float32)[:, 1:]
            sampler = padded([one.logprobs for one in part], torch.float32)[:, 1:]
            advantage = torch.tensor([one.advantage for one in part])[:, None]
            scores = model(input_ids=tokens, attention_mask=live, use_cache=False).logits[:, :-1]
            picked = scores.gather(-1, tokens[:, 1:, None])[..., 0]
            current = picked - torch.stack([row.logsumexp(-1) for row in scores])
            ratio = torch.exp(current - current.detach())
            low, high = 1 - workload.CLIPS[0], 1 + workload.CLIPS[1]
            policy = -torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
            weight = torch.exp(current.detach() - sampler).clamp(max=workload.TIS_CAP)
            loss = (weight * policy * mask).sum() / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    workload.serve(update, workload.load(arguments.batches))


if __name__ == "__main__":
    main()
