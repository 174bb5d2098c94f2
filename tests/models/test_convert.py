"""Conversion of damaged, hostile and unusual checkpoints: one clear error each, and nothing left
behind. A killed conversion never passes for a whole one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import restore, stored
from models.config import read_config
from models.convert import StoredWeights, check_paths, export_checkpoint, import_checkpoint
from models.errors import ModelError
from models.sharding import build_mesh
from models.shards import SafetensorsFolder, plan_shards
from models.weights import load_weights
from spade_jax import cli

GOLDEN = Path(__file__).parent / "golden"
EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the Llama checkpoint, a single file."""
    return Path(shutil.copytree(GOLDEN / "llama", tmp_path / "source"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A copy of the Qwen3 checkpoint, in several files."""
    return Path(shutil.copytree(GOLDEN / "qwen3", tmp_path / "source"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """The Llama checkpoint, converted; not to be changed."""
    folder = tmp_path_factory.mktemp("module") / "converted"
    import_checkpoint(GOLDEN / "llama", folder)
    return folder


def change_tensors(source: Path, change) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def change_json(path: Path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_header(path: Path, change) -> None:
    """Edit the header of a safetensors file without its writer's checks."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def refuse(source: Path, part: str, **options) -> None:
    """Conversion fails with one line that holds `part`, and leaves nothing behind."""
    target = source.parent / "target"
    before = sorted(path.name for path in source.parent.iterdir())
    with pytest.raises(ModelError) as caught:
        import_checkpoint(source, target, **options)
    assert part in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in source.parent.iterdir()) == before


def test_the_dtype_asked_for_is_stored(source: Path):
    target, back = source.parent / "target", source.parent / "back"
    config = import_checkpoint(source, target, dtype="bfloat16")
    assert set(stored.check_group(target, config, "blocks.0").values()) == {BF16}
    export_checkpoint(StoredWeights(target), config, target, back)
    given, found = load_file(source / "model.safetensors"), SafetensorsFolder(back)
    assert found.dtype(QUERY) == BF16
    assert np.array_equal(found.read(QUERY), given[QUERY].astype(BF16))
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    params = load_weights(target, config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}


def test_bfloat16_and_a_float32_router_stay_as_they_are(tmp_path: Path):
    source = Path(shutil.copytree(GOLDEN / "qwen3_moe", tmp_path / "source"))

    def change(tensors):
        for name in tensors:
            if ".mlp.gate." not in name:
                tensors[name] = tensors[name].astype(BF16)

    change_tensors(source, change)
    config = import_checkpoint(source, tmp_path / "target")
    export_checkpoint(
        StoredWeights(tmp_path / "target"), config, tmp_path / "target", tmp_path / "back"
    )
    ours, theirs = SafetensorsFolder(tmp_path / "back"), SafetensorsFolder(source)
    for name in theirs.names():
        assert ours.dtype(name) == theirs.dtype(name)
        assert ours.read(name).tobytes() == theirs.read(name).tobytes()


def test_a_head_that_repeats_the_tied_embedding_is_dropped(tmp_path: Path):
    source = Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "source"))
    change_tensors(source, lambda t: t.update({"lm_head.weight": t[EMBEDDING].copy()}))
    config = import_checkpoint(source, tmp_path / "target")
    assert config.tied_head
    shutil.rmtree(tmp_path / "target")
    change_tensors(source, lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1}))
    refuse(source, "lm_head.weight differs from model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: t.pop(EMBEDDING), f"missing, such as {EMBEDDING}"),
        (lambda t: t.update({EMBEDDING: np.ones((), np.float32)}), "has shape (), but"),
        (lambda t: t.update({"lm_head.weight": np.ones((), np.float32)}), "lm_head.weight differs"),
        (lambda t: t.update({"lm_head.weight": t[EMBEDDING][:-1]}), "lm_head.weight differs"),
    ],
)
def test_a_tied_head_without_its_embedding_is_refused(source: Path, change, part):
    change_json(source / "config.json", lambda values: values.update(tie_word_embeddings=True))
    change_tensors(source, lambda t: t.update({"lm_head.weight": t[EMBEDDING]}))
    change_tensors(source, change)
    refuse(source, part)


def test_buffers_of_old_writers_are_passed_over(source: Path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(source, lambda t: t.update({name: np.ones(4, np.float32)}))
    import_checkpoint(source, source.parent / "target")


def test_unaligned_tensors_are_read(source: Path):
    path = source / "model.safetensors"
    change_header(path, lambda header: header["__metadata__"].update({"odd": "x"}))
    data = path.read_bytes()
    while int.from_bytes(data[:8], "little") % 4 == 0:
        change_header(path, lambda header: header["__metadata__"].update({"odd": "xx"}))
        data = path.read_bytes()
    given = load_file(GOLDEN / "llama" / "model.safetensors")
    folder = SafetensorsFolder(source)
    assert all(np.array_equal(folder.read(name), value) for name, value in given.items())
    import_checkpoint(source, source.parent / "target")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: t.pop(QUERY), f"1 tensors are missing, such as {QUERY}"),
        (
            lambda t: t.update(extra=t[QUERY]),
            "1 tensors have no use in a llama model, such as extra",
        ),
        (lambda t: t.update({QUERY: t[QUERY][:-1]}), "has shape (31, 32), but the config asks for"),
        (lambda t: t.update({QUERY: t[QUERY].astype(np.int8)}), "is I8, expected one of F32"),
        (
            lambda t: t.update({QUERY: t[QUERY].astype(ml_dtypes.float8_e4m3fn)}),
            "is F8_E4M3, expected one of F32",
        ),
        (lambda t: t.update({QUERY: t[QUERY].astype(np.float64)}), "is F64, expected one of F32"),
        (lambda t: t.update({QUERY: t[QUERY] * np.inf}), f"{QUERY} holds NaN or infinity"),
        (
            lambda t: t.update({n: t[n].astype(BF16) for n in t if "layers.0.mlp.up" in n}),
            "they become one parameter; name a dtype for all by --dtype",
        ),
    ],
)
def test_tensors_that_are_not_the_models_are_named(source: Path, change, part):
    change_tensors(source, change)
    refuse(source, part)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard_is_refused(sharded: Path, keep):
    path = sharded / "model-00003-of-00006.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(sharded, "model-00003-of-00006.safetensors is not a whole safetensors file")


@pytest.mark.parametrize(
    ("shard", "part"),
    [
        ("../other/model.safetensors", "not a file name within the folder"),
        ("/etc/passwd", "not a file name within the folder"),
        ("..", "not a file name within the folder"),
        (".hidden.safetensors", "not a file name within the folder"),
        ("a/b.safetensors", "not a file name within the folder"),
        (7, "not a file name within the folder"),
        ("config.json", "expected a .safetensors file"),
        (
            "model-00007-of-00006.safetensors",
            "model-00007-of-00006.safetensors, which is not there",
        ),
    ],
)
def test_an_index_cannot_point_elsewhere(sharded: Path, shard, part):
    index = sharded / "model.safetensors.index.json"
    change_json(index, lambda values: values["weight_map"].update({QUERY: shard}))
    refuse(sharded, part)


def test_shards_must_be_what_the_index_says(sharded: Path):
    (sharded / "model-00002-of-00006.safetensors").rename(sharded / "aside")
    refuse(sharded, "model-00002-of-00006.safetensors, which is not there (1 of 6")
    (sharded / "aside").rename(sharded / "model-00002-of-00006.safetensors")
    first, second = (sharded / f"model-0000{n}-of-00006.safetensors" for n in (1, 2))
    one, two = load_file(first), load_file(second)
    name = next(iter(one))
    save_file(two | {name: one[name]}, second)
    refuse(sharded, f"the tensor {name} is in {first.name} and in {second.name}")
    save_file(two | {"stray": one[name]}, second)
    refuse(sharded, "holds stray, which model.safetensors.index.json places in no file")
    del two[(gone := next(iter(two)))]
    save_file(two, second)
    refuse(sharded, f"names {gone} in {second.name}, which does not hold it")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_broken_index_is_refused(sharded: Path, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refuse(sharded, "model.safetensors.index.json")


def test_pickles_are_never_opened(source: Path):
    class Bomb:
        def __reduce__(self):
            return os._exit, (1,)

    import pickle

    (source / "model.safetensors").unlink()
    refuse(source, "holds neither model.safetensors nor")
    for name in ("pytorch_model.bin", "model.pt"):
        (source / name).write_bytes(pickle.dumps(Bomb()))
        refuse(source, "can run code when opened")
        with pytest.raises(ModelError, match="can run code when opened"):
            import_checkpoint(source / name, source.parent / "target")
        (source / name).unlink()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "config.json cannot be read"),
        ("[1]", "holds list, expected a JSON object"),
        ("[" * 100_000, "config.json cannot be read"),
        ('{"model_type": "mamba"}', "architecture 'mamba' is not supported"),
    ],
)
def test_a_broken_config_is_refused(source: Path, text, part):
    (source / "config.json").write_text(text)
    refuse(source, part)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000"),
        ({"num_hidden_layers": 4000}, "num_hidden_layers=4000"),
        ({"num_hidden_layers": 3}, "9 tensors are missing"),
        ({"num_hidden_layers": 1}, "9 tensors have no use"),
        ({"hidden_size": 2**24}, "has shape (64, 32), but the config asks for (64, 16777216)"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs"),
        ({"model_type": "qwen2", "architectures": None}, "6 tensors are missing"),
    ],
)
def test_a_config_of_another_model_allocates_nothing(source: Path, changes, part):
    change_json(source / "config.json", lambda values: values.update(changes))
    started = time.process_time()
    refuse(source, part)
    assert time.process_time() - started < 5


def test_absurd_experts_are_counted_before_they_are_named(tmp_path: Path):
    source = Path(shutil.copytree(GOLDEN / "qwen3_moe", tmp_path / "source"))
    huge = {"num_hidden_layers": 4096, "num_local_experts": 65_536}
    change_json(source / "config.json", lambda values: values.update(huge))
    refuse(source, "the config asks for more than")


def test_a_tokenizer_is_needed_and_must_fit(source: Path, tmp_path: Path):
    path = source / "tokenizer.json"
    given = path.read_text()
    change_json(path, lambda values: values.update(added_tokens=[{"id": 64, "content": "x"}]))
    refuse(source, "the tokenizer has 65 ids, but the embedding has 64 rows")
    ids = [f'{{"model": {{"vocab": {{"a": {index}}}}}}}' for index in ('"b"', "-5", "true", "1e9")]
    for text in ("", "[]", '{"model": {"vocab": 3}}', *ids):
        path.write_text(text)
        refuse(source, f"{path} ")  # the file itself, not the copy that is gone
    path.write_text(given)
    (source / "tokenizer_config.json").write_text("[]")
    refuse(source, "tokenizer_config.json is not a JSON object")
    (source / "tokenizer_config.json").unlink()
    path.unlink()
    refuse(source, "holds no tokenizer: expected tokenizer.json or tokenizer.model")
    (source / "tokenizer.model").write_bytes(b"not one")
    refuse(source, "tokenizer.model is not a SentencePiece model")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tokenizer.json").write_text(given)
    import_checkpoint(source, tmp_path / "target", tokenizer=elsewhere)
    assert (tmp_path / "target" / "tokenizer.json").read_text() == given
    assert not (tmp_path / "target" / "tokenizer.model").exists()


def test_tokenizer_files_travel_as_they_are(source: Path, tmp_path: Path):
    names = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json")
    for name in names:
        (source / name).write_text("{}  ")
    (source / "modeling_llama.py").write_text("raise SystemExit")
    config = import_checkpoint(source, tmp_path / "target")
    export_checkpoint(
        StoredWeights(tmp_path / "target"), config, tmp_path / "target", tmp_path / "back"
    )
    for folder in (tmp_path / "target", tmp_path / "back"):
        assert all((folder / name).read_text() == "{}  " for name in names)
        assert not (folder / "modeling_llama.py").exists()


def test_source_and_destination_are_checked(source: Path, tmp_path: Path, converted: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for target, part in (
        (source, "source and destination are both"),
        (source / "inside", "lies within the source"),
        (tmp_path / "there", "already exists"),
        (tmp_path / "dangling", "already exists"),
        (tmp_path / "loop", "already exists"),
        (tmp_path / "\udcff", "is not UTF-8"),
    ):
        with pytest.raises(ModelError, match=part):
            check_paths(source, target)
    for absent in (tmp_path / "absent", tmp_path / "loop", tmp_path / ("x" * 300)):
        with pytest.raises(ModelError, match="does not exist"):
            check_paths(absent, tmp_path / "target")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        import_checkpoint(source / "config.json", tmp_path / "target")
    with pytest.raises(ModelError, match="converted already"):
        import_checkpoint(converted, tmp_path / "target")
    with pytest.raises(ModelError, match="not a folder made by"):
        StoredWeights(source)


def test_a_small_disk_is_found_out_first(source: Path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr("models.convert.shutil.disk_usage", lambda path: Usage)
    refuse(source, "needs 0.0 GB and the disk has 0.0 GB free")


def test_a_full_disk_leaves_nothing(source: Path, monkeypatch):
    def full(path, *rest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models.stored.sync", full)
    refuse(source, "No space left on device")


def test_no_room_on_the_device_is_told(converted: Path, monkeypatch):
    config = read_config(converted)
    monkeypatch.setattr(restore, "free_bytes", lambda device: 40_000)
    with pytest.raises(ModelError, match=r"need 0.00 GB on each of 1 devices, and .* has 0.00 GB"):
        load_weights(converted, config)
    monkeypatch.setattr(restore, "free_bytes", lambda device: 8 * 40_000)
    with pytest.raises(ModelError, match="on each of 8 devices"):
        load_weights(converted, config, build_mesh(8, 1, 1, 1))
    load_weights(converted, config, build_mesh(1, 4, 1, 2))  # in eight parts it fits
    monkeypatch.setattr(restore, "free_bytes", lambda device: None)
    load_weights(converted, config)


def test_free_memory_of_the_host_is_known():
    free = restore.free_bytes(jax.devices()[0])
    assert free is not None and 2**20 < free < 2**45


@pytest.mark.parametrize("group", ["outer", "blocks.1"])
def test_damage_to_stored_weights_is_found(converted: Path, tmp_path: Path, group):
    folder = Path(shutil.copytree(converted, tmp_path / "copy"))
    config = read_config(folder)
    path = max((folder / "weights" / group).rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match="is damaged; convert the checkpoint again"):
        load_weights(folder, config)
    path.unlink()
    with pytest.raises(ModelError, match="not a whole folder of converted weights"):
        load_weights(folder, config)
    (folder / "files.json").unlink()
    with pytest.raises(ModelError, match="not a whole folder of converted weights"):
        StoredWeights(folder)


def test_stored_weights_of_another_model_are_refused(converted: Path, tmp_path: Path):
    folder = Path(shutil.copytree(converted, tmp_path / "copy"))
    change_json(folder / "config.json", lambda values: values.update(mlp=48))
    with pytest.raises(ModelError, match=r"moe.down is \(1, 40, 32\) there and \(1, 48, 32\) here"):
        load_weights(folder, read_config(folder))
    with pytest.raises(ModelError, match="of another model than the weights"):
        export_checkpoint(StoredWeights(folder), read_config(folder), folder, tmp_path / "back")


KILLED = """
import os, signal, sys
from pathlib import Path
from models import stored
from models.convert import import_checkpoint
write = stored.write_group
def stop(folder, name, arrays):
    if name == "blocks.1":
        print("half", flush=True)
        signal.pause()
    write(folder, name, arrays)
stored.write_group = stop
import_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_conversion_is_not_taken_for_a_whole_one(source: Path, tmp_path: Path):
    target = tmp_path / "target"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(source), str(target)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    with pytest.raises(ModelError, match="being written by another process"):
        import_checkpoint(source, target)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    assert (tmp_path / ".target.partial" / "weights" / "blocks.0").is_dir()
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(target)
    import_checkpoint(source, target)
    names = {"source", "target"}
    assert {path.name for path in tmp_path.iterdir()} == names
    load_weights(target, read_config(target))


def test_files_are_cut_at_their_size():
    sizes = {"a": 2, "b": 2, "c": 9, "d": 1}
    entries = [(name, (size,), np.dtype(np.float32)) for name, size in sizes.items()]
    cut = plan_shards(entries, 16)
    assert [[entry[0] for entry in shard] for shard in cut] == [["a", "b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["convert"], "required: SOURCE, DESTINATION"),
        (["convert", "absent", "target"], "absent does not exist"),
        (["convert", "SOURCE", "SOURCE"], "source and destination are both"),
        (["convert", "SOURCE", "TARGET", "--to", "torch"], "invalid choice: 'torch'"),
        (["convert", "SOURCE", "TARGET", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["convert", "SOURCE", "TARGET", "--type", "x"], "unknown option --type"),
        (["convert", "SOURCE", "TARGET", "--to", "hf"], "not a folder made by"),
        (["convert", "SOURCE", "TARGET", "--tokenizer", "absent"], "absent holds no tokenizer"),
    ],
)
def test_the_command_line_answers_in_one_line(arguments, part, tmp_path, capsys):
    names = {"SOURCE": str(GOLDEN / "llama"), "TARGET": str(tmp_path / "target")}
    assert cli.main([names.get(argument, argument) for argument in arguments]) == 2
    message = capsys.readouterr().err.strip()
    assert part in message and "\n" not in message and message.startswith("spade-jax: ")
    assert list(tmp_path.iterdir()) == []


def test_the_command_converts_there_and_back(tmp_path: Path):
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert cli.main(["convert", str(GOLDEN / "qwen3_moe"), there]) == 0
    assert cli.main(["convert", there, back, "--to", "hf"]) == 0
    given, found = (load_file(Path(f) / "model.safetensors") for f in (GOLDEN / "qwen3_moe", back))
    assert given.keys() == found.keys()
    assert all(np.array_equal(found[name], value) for name, value in given.items())
