"""A contestant of the sampler benchmark: transformers' `generate`, batched turn by turn.

    python benchmarks/sampler_transformers.py SOURCE EPISODES.json [--threads 2] [--cache dynamic]

Needs torch, transformers, accelerate and gguf; started by `benchmarks/sampler.py`. SOURCE is a
Hugging Face folder or a GGUF file. Histories are padded on the left, the whole batch is sampled
until its longest completion is done, and the next turn encodes the longer histories anew, which is
what the library offers for a batch of conversations.
"""

import argparse
from pathlib import Path

import sampler_workload as workload
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Load, warm up and serve."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("episodes", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    parser.add_argument("--attention", default="sdpa")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    source: Path = arguments.source
    where, options = str(source), {}
    if source.is_file():
        where, options = str(source.parent), {"gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float32, attn_implementation=arguments.attention, **options
    ).eval()
    episodes = workload.load(arguments.episodes)
    more = {"cache_implementation": "static"} if arguments.cache == "static" else {}

    def generate(histories: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, histories))
        batch = torch.tensor([[0] * (width - len(ids)) + ids for ids in histories])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in histories])
        written = model.generate(
            batch,
            attention_mask=mask,
            max_new_tokens=max(lengths),
            min_new_tokens=None,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
            **more,
        )
        return written[:, width:].tolist()

    with torch.inference_mode():
        generate([episode.prompt for episode in episodes], [4] * len(episodes))
        workload.serve(
            {"torch": torch.__version__, "transformers": transformers.__version__},
            lambda: workload.play_in_turns(episodes, generate),
        )


if __name__ == "__main__":
    main()
