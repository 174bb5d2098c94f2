"""Find and open the tokenizer of a checkpoint: Hugging Face `tokenizer.json`, or a SentencePiece
`tokenizer.model` where there is none. Nothing is fetched, nothing in the folder is executed.
"""

import os
from pathlib import Path

from models.errors import ModelError
from models.json_file import read_plain
from models.tokenizer import byte_level, sentencepiece_model
from models.tokenizer.base import FILES, Tokenizer


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Open the tokenizer in `folder`; `tokenizer.json` counts where both kinds are there."""
    folder = Path(folder)
    kinds = {
        byte_level.FILE_NAME: byte_level.ByteLevelTokenizer,
        sentencepiece_model.FILE_NAME: sentencepiece_model.SentencePieceTokenizer,
    }
    found = [name for name in kinds if (folder / name).is_file()]
    if not found:
        there = "is not a folder" if not folder.is_dir() else "holds no tokenizer"
        raise ModelError(
            f"{folder} {there}: expected {' or '.join(kinds)} beside the weights; copy it from "
            "where the checkpoint came from"
        )
    files = {}
    for name in FILES:
        try:
            files[name] = read_plain(folder / name)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise ModelError(f"{folder / name} is not read: {error}; copy it again") from error
        except OSError as error:
            raise ModelError(
                f"{folder / name} cannot be read ({error.strerror}); give it back its rights or "
                "copy it again"
            ) from error
    try:
        return kinds[found[0]](files)
    except ModelError as error:
        raise ModelError(
            f"tokenizer {folder / found[0]} is not usable ({error}); restore the file or take the "
            "checkpoint's own again"
        ) from error
