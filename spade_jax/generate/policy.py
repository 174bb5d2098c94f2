"""A checkpoint to sample from: checked at once, and loaded when all else is right."""

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from models import backends, restore, stored
from models.config import CONFIG_FILE, TransformerConfig, read_config
from models.execution import Execution
from models.json_file import read_json
from models.sharding import build_mesh
from models.tokenizer import load_tokenizer
from models.transformer import Params
from models.weights import WEIGHTS_FILE, load_weights
from spade_jax.convert import RunWeights, run_of
from spade_jax.engine_config import EngineConfig
from spade_jax.errors import CheckpointError, ConfigError, SpadeError
from spade_jax.generate.files import LineError, read_prompts
from spade_jax.generate.options import Options
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.templates import choose
from spade_jax.types import SamplingParams

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.7  # of the memory that is free beside the weights


class Policy:
    """A checkpoint: its model and tokenizer at once, its weights when they are needed."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._folder = options.checkpoint
        self._run = _check_folder(self._folder)
        self.config = read_config(self._folder) if self._run is None else self._run.config
        self.tokenizer = load_tokenizer(self._folder)
        if self.tokenizer.vocab_size > self.config.vocab_size:
            raise CheckpointError(
                f"the tokenizer in {self._folder} has {self.tokenizer.vocab_size} pieces, but the "
                f"model has {self.config.vocab_size}; put the tokenizer of these weights there"
            )
        if (options.context or 0) > self.config.max_positions:
            raise SpadeError(
                f"--context {options.context}: the model is meant for sequences of at most "
                f"{self.config.max_positions} tokens"
            )
        self._unspoken = ""  # why there is no chat
        self._chat = self._make_chat()

    def _make_chat(self) -> Chat | None:
        options = self._options
        try:
            template = choose(self.tokenizer, options.template)
        except ConfigError as error:
            self._unspoken = str(error).replace("run.chat_template", "--template")
            if options.template != "auto":
                raise SpadeError(self._unspoken) from error
            return None
        if options.thinking and template.thinks == "never":
            raise SpadeError(
                f"--thinking: the chat template {template.name} of this checkpoint does not think"
            )
        if options.system is not None and not template.has_system:
            raise SpadeError(
                f"--system: the chat template {template.name} of this checkpoint has no system "
                "message"
            )
        return Chat(self.tokenizer, template, options.thinking or template.thinks == "always")

    @property
    def chat(self) -> Chat:
        """The chat format of the checkpoint."""
        if self._chat is None:
            raise SpadeError(self._unspoken)
        return self._chat

    def sampling(self, stop: Sequence[str]) -> SamplingParams:
        """How to sample, as the command line says."""
        options = self._options
        return SamplingParams(
            options.temperature,
            options.max_tokens,
            self._chat.stop_ids if self._chat else (),
            options.top_p,
            options.top_k,
            options.min_p,
            stop_strings=tuple(stop),
        )

    def read(self, path: Path) -> list[Int[np.ndarray, "_"]]:
        """The token ids of every prompt in a file.

        Raises:
            SpadeError: names the line that cannot be used.
        """
        context = self._options.context or self.config.max_positions
        prompts = []
        for number, kind, value in read_prompts(path):
            try:
                tokens = self._encode(kind, value)
            except SpadeError as error:
                raise LineError(path, number, str(error)) from error
            if len(tokens) == 0:
                raise LineError(path, number, f"{kind} is empty; expected at least one token")
            if len(tokens) >= context:
                raise LineError(
                    path,
                    number,
                    f"{len(tokens)} tokens leave no room to sample in a context of {context} "
                    f"({'--context' if self._options.context else 'the longest of this model'})",
                )
            prompts.append(tokens)
        if not prompts:
            raise SpadeError(f"prompts file {str(path)!r} holds no prompt")
        if self._chat is None and not self._options.stop:
            logger.warning("nothing but --max-tokens ends a completion: %s", self._unspoken)
        return prompts

    def _encode(self, kind: str, value: Any) -> Int[np.ndarray, " seq"]:
        if kind == "tokens":
            wrong = [token for token in value if not 0 <= token < self.config.vocab_size]
            if wrong:
                raise SpadeError(
                    f"token id {wrong[0]} is not in the vocabulary, 0 to "
                    f"{self.config.vocab_size - 1}"
                )
            return np.array(value, np.int32)
        system = self._options.system
        if kind == "messages":
            return self._conversation(value, system)
        if self._options.chat:
            return self.chat.open(value, system)
        begin = self._chat.template.begin if self._chat else ""
        start = [self.tokenizer.control(begin)] if begin else []
        text = self.tokenizer.encode(value)
        return np.array([*start, *text] if text else [], np.int32)

    def _conversation(
        self, messages: list[dict[str, str]], system: str | None
    ) -> Int[np.ndarray, " seq"]:
        chat = self.chat
        if messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        pieces = [chat.open(messages[0]["content"], system)]
        for answer, question in zip(messages[1::2], messages[2::2], strict=True):
            completion = chat.finish(answer["content"])
            pieces += [completion, chat.reply(completion, question["content"])]
        return np.concatenate(pieces)

    def engine(self, *, slots: int, context: int, queue: int, decode_steps: int) -> Engine:
        """Load the weights and compile the sampler."""
        tensor = self._options.tensor
        devices = jax.local_devices()
        if tensor > len(devices):
            raise SpadeError(f"--tensor {tensor}: there are {len(devices)} devices")
        mesh = build_mesh(1, 1, 1, tensor, devices[:tensor])
        execution = backends.resolve(Execution(), self.config, devices[0])
        # What is only sampled needs no wider weights than it computes with.
        execution = dataclasses.replace(execution, param_dtype=execution.compute_dtype)
        started = time.perf_counter()
        params = self._weights(mesh, execution)
        loaded = time.perf_counter()
        config = EngineConfig(
            slots=slots, queue=queue, context_tokens=context, decode_steps=decode_steps
        )
        room = _room(self.config, mesh, execution, config)
        config = dataclasses.replace(config, kv_tokens=room)
        engine = Engine(self.config, config, mesh, execution, tokenizer=self.tokenizer)
        engine.compile()
        engine.load(params, version=0)
        logger.info(
            "read the weights in %.0f s, compiled %d programs in %.0f s",
            loaded - started,
            engine.num_compiles,
            time.perf_counter() - loaded,
        )
        return engine

    def _weights(self, mesh: Mesh, execution: Execution) -> Params:
        if self._run is None:
            return load_weights(self._folder, self.config, mesh, execution)
        restore.check_room(self.config, mesh, execution)
        return restore.load_groups(self._run.read_onto, self.config, mesh, execution)


def _check_folder(folder: Path) -> RunWeights | None:
    """Return the run in a folder, or None if it holds weights that can be read."""
    expected = "expected a folder that spade-jax convert made, or a run folder"
    if not os.path.isdir(folder):
        if os.path.isfile(folder) and folder.suffix == ".gguf":
            expected = f"bring it in first: spade-jax convert {folder} DESTINATION"
        what = "is not a folder" if os.path.lexists(folder) else "does not exist"
        raise CheckpointError(f"checkpoint {str(folder)!r} {what}; {expected}")
    if (run := run_of(folder)) is not None:
        return RunWeights(run)
    try:
        public = "model_type" in read_json(folder / CONFIG_FILE)
    except (OSError, ValueError, TypeError):
        public = False
    if public:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is a public one; bring it in first: spade-jax convert "
            f"{folder} DESTINATION"
        )
    if not stored.is_stored(folder) and not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(f"checkpoint {str(folder)!r} holds no weights; {expected}")
    return None


def _room(config: TransformerConfig, mesh: Mesh, execution: Execution, engine: EngineConfig) -> int:
    """Tokens that the cache can hold: all slots', or what the memory beside the weights allows."""
    tensor = mesh.shape["tensor"]
    heads = config.num_kv_heads // (tensor if config.num_kv_heads % tensor == 0 else 1)
    itemsize = np.dtype(jax.numpy.dtype(execution.compute_dtype)).itemsize
    size = 2 * config.num_layers * heads * config.head_dim * itemsize
    least = max(2, engine.pages_per_row) * engine.page_tokens
    wanted = max(least, engine.slots * engine.pages_per_row * engine.page_tokens)
    free = restore.free_bytes(mesh.local_devices[0])
    if free is None:
        return wanted
    room = int(CACHE_SHARE * free) // size
    if room < least:
        raise SpadeError(
            f"the cache of one sequence of {engine.context_tokens} tokens needs "
            f"{size * least / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free beside the weights; "
            "lower --context"
        )
    if room < wanted:
        logger.info("the cache holds %d tokens, as memory is short of %d", room, wanted)
    return min(room, wanted)
