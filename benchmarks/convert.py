"""Memory and time of converting a large checkpoint: a synthetic one of 8 GB, made here.

    python benchmarks/convert.py [--gigabytes 8] [--folder DIR]

Makes a Llama checkpoint of random bfloat16 values in shards of 4 GB, converts it in a process of
its own as `spade-jax convert` does, and samples that process's anonymous resident memory (RssAnon:
mapped files are not in it), then turns the result back and compares every byte. Prints what was
measured and the goals as JSON. Everything is made below --folder and removed at the end; it needs
three times the size on the disk.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from models import tensors
from models.hf import from_hf, to_hf
from models.shards import SafetensorsFolder, nbytes, write_folder

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = {  # a model of 8 billion parameters has such layers
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
}


def make_source(folder: Path, gigabytes: float) -> tuple[int, int]:
    """Write the checkpoint; return its size and that of its largest tensor."""

    def entries_of(num_layers: int):
        config = from_hf(SHAPE | {"num_hidden_layers": num_layers}, "benchmark")
        parts = [
            (part, tensor.part_shape, BF16)
            for tensor in tensors.all_tensors(config)
            for part in tensor.parts
        ]
        return config, parts, [nbytes(shape, dtype) for _, shape, dtype in parts]

    num_layers = 1
    while sum(entries_of(num_layers)[2]) < gigabytes * 1e9:
        num_layers += 1
    config, entries, sizes = entries_of(num_layers)
    rng = np.random.default_rng(0)
    # Drawn once and cut anew for each tensor: bytes that compress as weights do.
    pool = (rng.standard_normal(2**24, dtype=np.float32) * 0.02).astype(BF16)

    def values() -> Iterator[np.ndarray]:
        for _, shape, _ in entries:
            size = int(np.prod(shape))
            yield np.resize(np.roll(pool, rng.integers(pool.size)), size).reshape(shape)

    folder.mkdir()
    write_folder(folder, entries, values(), shard_bytes=4 * 10**9)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return sum(sizes), max(sizes)


def run(*arguments: str) -> dict[str, float]:
    """Run the command in a process of its own; return its peak memory and its times."""
    started = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([sys.executable, "-m", "spade_jax.cli", "convert", *arguments])
    peaks = {"RssAnon": 0, "VmRSS": 0}

    def sample() -> None:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            for line in status.splitlines():
                name, _, value = line.partition(":")
                if name in peaks:
                    peaks[name] = max(peaks[name], 1024 * int(value.split()[0]))
            time.sleep(0.01)

    sampler = threading.Thread(target=sample)
    sampler.start()
    process.wait()
    sampler.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        sys.exit(f"converting failed with exit code {process.returncode}")
    return {
        "anonymous_peak_gb": round(peaks["RssAnon"] / 1e9, 3),
        "resident_peak_gb": round(peaks["VmRSS"] / 1e9, 3),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "wall_s": round(time.perf_counter() - started, 1),
    }


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, byte by byte."""
    ours, theirs = SafetensorsFolder(one), SafetensorsFolder(other)
    return set(ours.names()) == set(theirs.names()) and all(
        np.array_equal(ours.read(name).view(np.uint16), theirs.read(name).view(np.uint16))
        for name in ours.names()
    )


def main() -> None:
    """Make, convert, turn back, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    free = shutil.disk_usage(options.folder).free
    if free < 3.2e9 * options.gigabytes:
        sys.exit(f"{options.folder} has {free / 1e9:.0f} GB free; three times the size is needed")
    work = Path(tempfile.mkdtemp(prefix="convert-", dir=options.folder))
    try:
        source, target, back = work / "source", work / "target", work / "back"
        total, largest = make_source(source, options.gigabytes)
        there = run(str(source), str(target))
        stored = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        again = run(str(target), str(back), "--to", "hf")
        limit = 1.5 + 2 * largest / 1e9
        result = {
            "checkpoint_gb": round(total / 1e9, 2),
            "largest_tensor_gb": round(largest / 1e9, 3),
            "stored_gb": round(stored / 1e9, 2),
            "import": there,
            "export": again,
            "limit_gb": round(limit, 2),
        }
        print(json.dumps(result, indent=2))
        peak, exact = there["anonymous_peak_gb"], same(source, back)
        goals = (
            ("anonymous_peak_gb", peak, round(limit, 2), peak <= limit),
            ("hf_to_orbax_to_hf_is_bit_exact", exact, True, exact),
        )
        names = ("name", "value", "goal", "holds")
        print(json.dumps({"goals": [dict(zip(names, goal, strict=True)) for goal in goals]}))
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
