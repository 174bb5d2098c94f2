"""Folders in both released layouts, and everything that can be wrong with one."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spade_jax.envs.api import MAX_PROGRAM_BYTES
from spade_jax.envs.spade_pools import Layout, Problem, read_pool, write_pool
from spade_jax.envs.spade_texts import adopt
from spade_jax.errors import SpadeError
from spade_jax.types import Environment, EnvironmentSource, Verdict


def code(name: str = "A") -> str:
    return f"class {name}Env:\n    def reset(self, seed=None):\n        return '{name}', {{}}\n"


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def files(folder: Path, contents: dict[str, str | bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def numbered(folder: Path, texts: dict[str, str], **row: object) -> Path:
    """The layout of the pool of 7,872 games."""
    rows = [
        {
            "game_id": Path(name).stem,
            "file_name": name,
            "original_file_name": f"old_{name}",
            "skill": "Causal Inference",
            "sha256": digest(text),
            "line_count": text.count("\n"),
            **row,
        }
        for name, text in texts.items()
    ]
    sums = "".join(f"{digest(text)}  games/{name}\n" for name, text in texts.items())
    games = {f"games/{name}": text for name, text in texts.items()}
    more = {"validation_manifest.jsonl": lines({"ok": True}), "validation_summary.json": "{}"}
    lists = {"manifest.jsonl": lines(*rows), "checksums.sha256": sums}
    return files(folder, {**games, **more, **lists})


def test_numbered_layout(tmp_path: Path):
    texts = {f"game_{index:06d}.py": code(name) for index, name in enumerate("ABC")}
    pool = read_pool(numbered(tmp_path, texts))
    assert pool.problems == []
    assert [entry.path for entry in pool.entries] == [f"games/game_00000{i}.py" for i in range(3)]
    first = pool.entries[0]
    assert first.source == EnvironmentSource(adopt(code("A")), "Causal Inference", "", "")
    assert first.notes["original_file_name"] == "old_game_000000.py"
    assert "sha256" not in first.notes


def test_generations_layout_with_hints(tmp_path: Path):
    path = "games/gen_0004/game_00004_001_math.py"
    game = {
        "generation": 4,
        "step": 4,
        "filename": Path(path).name,
        "skill": "Math",
        "difficulty": "hard",
        "path_in_dataset": path,
        "has_hint": True,
        "n_plays": 8,
    }
    promised = {**game, "path_in_dataset": "games/gen_0004/b.py"}
    contents = {
        path: code("A"),
        path.replace(".py", "_hint.txt"): "Look left.",
        "games/gen_0004/b.py": code("B"),
        "manifest.json": json.dumps({"summary": {"n_games": 2}, "games": [game, promised]}),
    }
    pool = read_pool(files(tmp_path, contents))
    assert [entry.hint for entry in pool.entries] == ["Look left.", ""]
    assert pool.entries[0].source.difficulty == "hard"
    assert pool.entries[0].notes == {"generation": 4, "step": 4, "has_hint": True, "n_plays": 8}
    missing = "the manifest promises a hint; there is none"
    assert pool.problems == [Problem("games/gen_0004/b_hint.txt", missing)]


def test_folder_of_tool_programs(tmp_path: Path):
    rows = [{"source_run": "run_a", "filename": "shop.py", "skill": "API", "mean_reward": None}]
    text = "class ShopEnv(ToolUseBaseEnv):\n    pass\n"
    terminal = "class ShellEnv(TerminalBaseEnv):\n    pass\n"
    contents = {
        "manifest.json": json.dumps({"environments": [*rows, {"filename": "shell.py"}]}),
        "environments/run_a/shop.py": text,
        "environments/run_a/shell.py": terminal,
    }
    pool = read_pool(files(tmp_path, contents))
    assert [entry.path for entry in pool.entries] == ["environments/run_a/shop.py"]
    assert pool.problems == [
        Problem("shell.py", "ShellEnv builds on TerminalBaseEnv, which is not known here")
    ]


def test_manifest_that_is_a_list(tmp_path: Path):
    contents = {"manifest.json": lines([{"path": "a.py"}]), "a.py": code()}
    assert len(read_pool(files(tmp_path, contents)).entries) == 1


def outside(folder: Path) -> str:
    (folder.parent / "secret.py").write_text(code("Secret"))
    return "../secret.py"


def linked(folder: Path) -> str:
    (folder.parent / "secret.py").write_text(code("Secret"))
    (folder / "link.py").symlink_to(folder.parent / "secret.py")
    return "link.py"


def loop(folder: Path) -> str:
    (folder / "loop.py").symlink_to(folder / "loop.py")
    return "loop.py"


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.py")
    return "pipe.py"


def folder_named_like_a_program(folder: Path) -> str:
    (folder / "dir.py").mkdir()
    return "dir.py"


def written(name: str, content: str | bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        files(folder, {name: content})
        return name

    return write


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (outside, "a path that leads out of the folder"),
        (lambda folder: str(folder.parent / outside(folder)[3:]), "a path that leads out"),
        (linked, "a path that leads out of the folder"),
        (loop, "there is no such file|not a usable path"),
        (pipe, "there is no such file"),
        (folder_named_like_a_program, "there is no such file"),
        (lambda folder: "nothing.py", "there is no such file"),
        (lambda folder: "a\0b.py", "not a usable path: ValueError"),
        (lambda folder: "x" * 5000, "not a usable path: OSError|there is no such file"),
        (written("big.py", code() + "#" * MAX_PROGRAM_BYTES), f"more than {MAX_PROGRAM_BYTES} byt"),
        (written("wide.py", code() + "#" * (MAX_PROGRAM_BYTES - 500)), "the program has"),
        (written("bytes.py", b"class \xffEnv: pass"), "not UTF-8 at byte 6"),
        (written("broken.py", "class XEnv(:"), "SyntaxError"),
        (written("empty.py", ""), "no class whose name ends in Env"),
    ],
)
def test_bad_file_is_reported_and_the_others_are_read(
    tmp_path: Path, make: Callable[[Path], str], reason: str
):
    folder = tmp_path / "pool"
    files(folder, {"good.py": code("Good"), "late.py": code("Late")})
    name = make(folder)
    rows = [{"path": "good.py"}, {"path": name}, {"path": "late.py"}]
    pool = read_pool(files(folder, {"manifest.jsonl": lines(*rows)}))
    assert [entry.path for entry in pool.entries] == ["good.py", "late.py"]
    (problem,) = [problem for problem in pool.problems if problem.path == name]
    assert any(part in problem.reason for part in reason.split("|")), problem


def test_checksums(tmp_path: Path):
    texts = {name: code(name[0].upper()) for name in ("a.py", "b.py", "c.py", "d.py")}
    folder = numbered(tmp_path, texts)
    rows = [
        {"file_name": "a.py", "sha256": digest(texts["a.py"]).upper()},
        {"file_name": "b.py", "sha256": digest("else")},
        {"file_name": "c.py", "sha256": "short"},
        {"file_name": "d.py"},
    ]
    sums = f"{digest('else')} *./games/d.py\n\nodd\n"
    files(folder, {"manifest.jsonl": lines(*rows), "checksums.sha256": sums})
    pool = read_pool(folder)
    assert [entry.path for entry in pool.entries] == ["games/a.py"]
    assert pool.problems == [
        Problem("b.py", "its SHA-256 is not the one of the manifest"),
        Problem("c.py", "the manifest gives no SHA-256: 'short'"),
        Problem("d.py", "its SHA-256 is not the one of checksums.sha256"),
    ]


def test_names_and_programs_given_twice(tmp_path: Path):
    rows = [{"path": "a/x.py"}, {"path": "a/../a/x.py"}, {"path": "b/copy.py"}, {"path": "same.py"}]
    contents = {
        "a/x.py": code(),
        "b/copy.py": code(),
        "c/same.py": code("B"),
        "d/same.py": code("C"),
        "manifest.jsonl": lines(*rows),
    }
    pool = read_pool(files(tmp_path, contents))
    assert [entry.path for entry in pool.entries] == ["a/x.py"]
    assert pool.problems == [
        Problem("a/../a/x.py", "named twice; first as a/x.py"),
        Problem("b/copy.py", "the same program as a/x.py"),
        Problem("same.py", "2 files have this name"),
        Problem("c/same.py", "not in the manifest; not taken"),
        Problem("d/same.py", "not in the manifest; not taken"),
    ]


def test_manifest_with_bad_lines(tmp_path: Path):
    manifest = '{"path": "a.py"}\n\nnot json\n[1]\n3\n{"no": "path"}\n{"path": 7}\n' + "[" * 9999
    pool = read_pool(files(tmp_path, {"a.py": code(), "manifest.jsonl": manifest}))
    assert len(pool.entries) == 1
    assert len(pool.problems) == 6
    assert all(problem.path.startswith("manifest.jsonl:") for problem in pool.problems)


@pytest.mark.parametrize("manifest", [b"\xff\xfe", b"null", b"3", b'{"games": {}}', b"{"])
def test_useless_manifest(tmp_path: Path, manifest: bytes):
    pool = read_pool(files(tmp_path, {"a.py": code(), "manifest.json": manifest}))
    assert pool.entries == []
    assert Problem("a.py", "not in the manifest; not taken") in pool.problems


def test_without_a_manifest_every_file_is_tried(tmp_path: Path):
    contents = {"games/a.py": code(), "games/b.py": "x = 1", "checksums.sha256": b"\xff"}
    pool = read_pool(files(tmp_path, contents))
    assert [entry.path for entry in pool.entries] == ["games/a.py"]
    assert [problem.path for problem in pool.problems] == [
        "checksums.sha256",
        "manifest.jsonl",
        "games/b.py",
    ]


def test_hint_that_cannot_be_read(tmp_path: Path):
    contents = {"a.py": code(), "a_hint.txt": b"\xff", "manifest.jsonl": lines({"path": "a.py"})}
    pool = read_pool(files(tmp_path, contents))
    assert pool.entries[0].hint == ""
    assert pool.problems == [Problem("a_hint.txt", "not UTF-8 at byte 0")]


def test_no_folder(tmp_path: Path):
    with pytest.raises(SpadeError, match="is not a folder"):
        read_pool(tmp_path / "nothing")


def environments() -> list[Environment]:
    made = []
    for index, skill in enumerate(("Math", "Causal Inference", "")):
        program = f"class Game{index}Env:\n    def reset(self, seed):\n        return 'é {index}'\n"
        source = EnvironmentSource(program, skill, "easy", f"document {index}")
        hint = "" if index == 2 else f"hint {index}\n☃"
        made.append(Environment(source, hint, 4 * index, f"design_{index}", Verdict(True)))
    return made


@pytest.mark.parametrize("layout", ["numbered", "generations"])
def test_written_pool_reads_back_the_same(tmp_path: Path, layout: Layout):
    folder = tmp_path / "out"
    write_pool(folder, environments(), layout)
    pool = read_pool(folder)
    assert pool.problems == []
    assert [entry.source for entry in pool.entries] == [e.source for e in environments()]
    assert [entry.hint for entry in pool.entries] == [e.hint for e in environments()]
    assert [entry.notes["environment_id"] for entry in pool.entries] == [
        environment.environment_id for environment in environments()
    ]
    sums = (folder / "checksums.sha256").read_text().splitlines()
    listed = dict(reversed(line.split("  ")) for line in sums)
    on_disk = {
        str(path.relative_to(folder)): digest(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != "checksums.sha256"
    }
    assert listed == on_disk


def test_written_manifests_have_the_released_fields(tmp_path: Path):
    write_pool(tmp_path / "g", environments(), "generations")
    manifest = json.loads((tmp_path / "g" / "manifest.json").read_text())
    assert manifest["summary"] == {
        "n_games": 3,
        "n_with_skill": 2,
        "n_with_hint": 2,
        "steps_covered": [0, 4, 8],
    }
    second = manifest["games"][1]
    assert second["path_in_dataset"] == "games/gen_0004/game_00004_001_causal_inference.py"
    assert second["sha256"] == digest((tmp_path / "g" / second["path_in_dataset"]).read_bytes())
    assert second["verdict"]["admitted"] is True
    write_pool(tmp_path / "n", environments(), "numbered")
    rows = (tmp_path / "n" / "manifest.jsonl").read_text().splitlines()
    assert [json.loads(row)["path_in_dataset"] for row in rows] == [
        f"games/game_00000{index}.py" for index in range(3)
    ]


def test_imported_pool_goes_out_as_it_came_in(tmp_path: Path):
    texts = {
        "a.py": code("A"),
        "b.py": '"""Doc"""\nfrom __future__ import annotations\n' + code("B"),
    }
    entries = read_pool(numbered(tmp_path / "in", texts)).entries
    write_pool(
        tmp_path / "out",
        [Environment(entry.source, "", 0, "", Verdict(True)) for entry in entries],
        "numbered",
    )
    written = [(tmp_path / "out" / f"games/game_00000{i}.py").read_text() for i in range(2)]
    assert written == list(texts.values())


def test_write_refuses_a_folder_in_use_and_a_program_without_environment(tmp_path: Path):
    files(tmp_path, {"a.py": ""})
    with pytest.raises(SpadeError, match="is not empty"):
        write_pool(tmp_path, environments())
    odd = Environment(EnvironmentSource("x = 1", "", "", ""), "", 0, "", Verdict(True))
    with pytest.raises(SpadeError, match="no class whose name ends in Env"):
        write_pool(tmp_path / "new", [odd])


def test_empty_pool(tmp_path: Path):
    write_pool(tmp_path / "out", [])
    assert read_pool(tmp_path / "out").entries == []
