"""Opening the tokenizer of a folder, saving it again, and decoding as ids come."""

import random
import shutil
from pathlib import Path

import pytest

from models.errors import ModelError
from models.tokenizer import load_tokenizer, train
from models.tokenizer.byte_level import ByteLevelTokenizer
from models.tokenizer.sentencepiece_model import SentencePieceTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "chat"
TINY = Path("assets/tiny")


@pytest.mark.parametrize("folder", [FOLDER / "qwen3", FOLDER / "llama3", TINY])
def test_what_is_saved_loads_as_the_same_tokenizer(folder, tmp_path):
    first = load_tokenizer(folder)
    first.save(tmp_path / "copy")
    second = load_tokenizer(tmp_path / "copy")
    text = "class AEnv:\n    pass  # caf\u00e9"
    assert second.encode(text) == first.encode(text)
    assert second.digest == first.digest and second.template_text == first.template_text
    assert not list((tmp_path / "copy").glob("*.partial"))


def test_each_kind_is_found_and_tokenizer_json_counts_first(tmp_path):
    assert isinstance(load_tokenizer(TINY), SentencePieceTokenizer)
    assert isinstance(load_tokenizer(FOLDER / "smollm2"), ByteLevelTokenizer)
    for folder in (TINY, FOLDER / "smollm2"):
        for path in folder.glob("tokenizer*"):
            shutil.copy(path, tmp_path)
    both = load_tokenizer(tmp_path)
    assert isinstance(both, ByteLevelTokenizer) and "tokenizer.model" in both.files


def test_saving_takes_the_place_of_another_tokenizer(tmp_path):
    load_tokenizer(FOLDER / "qwen3").save(tmp_path)
    load_tokenizer(TINY).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.model"]


def test_the_digest_is_of_every_file(tmp_path):
    load_tokenizer(FOLDER / "qwen3").save(tmp_path)
    digests = {load_tokenizer(tmp_path).digest}
    (tmp_path / "chat_template.jinja").write_text("<|im_start|>")
    digests.add(load_tokenizer(tmp_path).digest)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    digests.add(load_tokenizer(tmp_path).digest)
    assert len(digests) == 3


def test_the_chat_template_is_read_wherever_it_stands(tmp_path):
    load_tokenizer(FOLDER / "qwen3").save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for text, expected in [
        ("{}", None),
        ('{"chat_template": "one"}', "one"),
        ('{"chat_template": 5}', None),
        ('{"chat_template": [{"name": "rag", "template": "a"}, 1]}', None),
        ('{"chat_template": [{"name": "rag"}, {"name": "default", "template": "b"}]}', "b"),
    ]:
        config.write_text(text)
        assert load_tokenizer(tmp_path).template_text == expected
    (tmp_path / "chat_template.jinja").write_text("of its own")
    assert load_tokenizer(tmp_path).template_text == "of its own"
    config.write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json holds a list"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"holds no tokenizer: expected tokenizer\.json or"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        load_tokenizer(TINY).save(tmp_path / "file")
    with pytest.raises(ModelError, match="cannot be written"):
        train(["a text of words " * 9] * 9, tmp_path / "file" / "x.model", 370)


@pytest.mark.parametrize("folder", [FOLDER / "qwen3", TINY])
def test_a_stream_gives_out_whole_characters_and_what_decode_gives(folder):
    tokenizer = load_tokenizer(folder)
    stream = tokenizer.stream()
    ids = tokenizer.encode("a\U0001f600")
    parts = [stream.add([index]) for index in ids]
    assert parts[0] == "a" and parts[-1] == "\U0001f600" and set(parts[1:-1]) <= {""}
    assert stream.close() == ""
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(20))]
        stream, text, rest = tokenizer.stream(), "", ids
        while rest:
            count = rng.randrange(1, 4)
            text += stream.add(rest[:count])
            rest = rest[count:]
        assert text + stream.close() == tokenizer.decode(ids)


def test_a_character_that_is_never_completed_comes_out_at_the_end():
    tokenizer = load_tokenizer(TINY)
    stream = tokenizer.stream()
    assert stream.add(tokenizer.encode("\U0001f600")[:2]) == ""
    assert stream.close() == "\ufffd"
