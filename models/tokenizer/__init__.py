"""Text to token ids and back. `load_tokenizer` opens the tokenizer of a checkpoint's folder; what
it returns is a `Tokenizer`, whatever the files are. `fit` and `train` make the project's own kind.
"""

from models.tokenizer.base import TextStream, Tokenizer
from models.tokenizer.files import load_tokenizer
from models.tokenizer.sentencepiece_model import MARKS, fit, train

__all__ = ["MARKS", "TextStream", "Tokenizer", "fit", "load_tokenizer", "train"]
