"""`spade-jax warmstart`: teach a small policy, from random weights, to speak in both roles.

A small policy cannot write Python untaught, so it imitates the environment library: designs
grounded in documents, hints, and expert plays. The result is a folder with tokenizer and weights
that `train` starts from (`run.init_from`). There is no resume here: a warm start is short, and the
same command and seed make the same weights on the same machine.
"""

import asyncio
import dataclasses
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from models import backends
from models.sharding import build_mesh
from models.tokenizer import Tokenizer, load_tokenizer
from models.tokenizer import fit as fit_tokenizer
from models.transformer import init_params
from models.weights import load_weights, save_weights
from spade_jax.config import BatchConfig, Config, WarmstartConfig
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import ConfigError
from spade_jax.learner.batch import make_batch, make_entries
from spade_jax.learner.packing import pack
from spade_jax.learner.step import Learner
from spade_jax.roles.corpus import Corpus, excerpt
from spade_jax.roles.designer import MAX_TERMS
from spade_jax.roles.examples import (
    Example,
    Grounded,
    copy_examples,
    ground,
    play_examples,
    text_examples,
)
from spade_jax.roles.prompts import compact
from spade_jax.rollout.chat import Chat
from spade_jax.types import Group, Role, Trajectory

logger = logging.getLogger(__name__)

TOKENIZER_PROGRAMS = 1500  # prompts and programs the tokenizer is fitted to
TOKENIZER_DOCUMENTS = 500  # whole documents it is fitted to
WARMUP_STEPS = 50
ROLE_WEIGHTS = {Role.DESIGNER: 1.0, Role.AGENT: 0.5}  # programs are harder to learn than plays


def warmstart(config: Config) -> Path:
    """Make the tokenizer, train the policy, write both to `warmstart.out`; return that folder."""
    out = Path(config.warmstart.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"warmstart.out={str(out)!r} cannot be made ({error.strerror}); choose a folder "
            f"you may write"
        ) from error
    _teach(config, out)
    logger.info("tokenizer and weights are in %s", out)
    return out


def _teach(config: Config, out: Path) -> None:
    if not config.corpus.enabled:
        raise ConfigError(
            "corpus.enabled=False, but the warm start teaches designs that are grounded in "
            "documents; leave it on for `warmstart`"
        )
    if config.execution.param_dtype == "bfloat16":
        raise ConfigError(
            "execution.param_dtype='bfloat16' is for weights beneath adapters, and the warm start "
            "trains the weights themselves; leave it at 'float32' for `warmstart`"
        )
    corpus = Corpus.load(config.corpus, config.run.seed)
    if start := config.warmstart.init_from:
        tokenizer = load_tokenizer(start)
    else:
        tokenizer = _fit_tokenizer(config, corpus)
    chat = Chat(tokenizer)
    started = time.perf_counter()
    plays = asyncio.run(_plays(config, corpus, chat))
    logger.info(
        "%d documents, %d expert plays in %.0f s",
        len(corpus),
        len(plays),
        time.perf_counter() - started,
    )
    mesh = build_mesh(**dataclasses.asdict(config.mesh))
    execution = backends.resolve(config.execution, config.model, mesh.devices.flat[0])
    optimiser = dataclasses.replace(
        config.learner,
        lr=config.warmstart.lr,
        schedule="cosine",
        warmup_steps=min(WARMUP_STEPS, config.warmstart.steps // 10),
        decay_steps=config.warmstart.steps,
        loss="grpo",
        reduction="token",
        router_replay=False,
        lora_rank=0,
    )
    learner = Learner(config.model, optimiser, mesh, execution)
    state = learner.init(
        load_weights(start, config.model, mesh, execution)
        if start
        else init_params(config.model, jax.random.key(config.run.seed), mesh, execution)
    )
    batches = _batches(config, corpus, chat, plays)
    for step in range(config.warmstart.steps):
        started = time.perf_counter()
        examples = next(batches)
        batch = make_batch(
            make_entries(_groups(examples), optimiser),
            _batch_config(config),
            ROLE_WEIGHTS,
            policy_version=0,
            learner=optimiser,
            shards=learner.shards,
        )
        state, metrics = learner.step(state, batch, objective="nll")
        if step % config.warmstart.log_steps == 0 or step == config.warmstart.steps - 1:
            logger.info("%s", _line(config, step, examples, metrics, time.perf_counter() - started))
            save_weights(out, config.model, state.params)
            if step == 0:  # not before there are weights to go with it: `out` may hold a pair
                tokenizer.save(out)


def _batch_config(config: Config) -> BatchConfig:
    row_tokens = config.warmstart.row_tokens
    rows = min(max(config.batch.device_tokens // row_tokens, 1), config.warmstart.rows)
    return BatchConfig(row_tokens=row_tokens, device_tokens=rows * row_tokens)


def _fit_tokenizer(config: Config, corpus: Corpus) -> Tokenizer:
    """Fit the tokenizer to prompts and programs as the policy will meet them, and to whole
    documents.
    """
    rng = random.Random(f"tokenizer/{config.run.seed}")
    texts = [
        part for _ in range(TOKENIZER_PROGRAMS) for part in _texts(_grounded(rng, corpus, config))
    ]
    texts += [corpus[rng.randrange(len(corpus))].text for _ in range(TOKENIZER_DOCUMENTS)]
    words = _offered(config, corpus)[: config.warmstart.words]
    return fit_tokenizer(texts, config.model.vocab_size, words)


def _grounded(rng: random.Random, corpus: Corpus, config: Config) -> Grounded:
    designer = config.designer
    return ground(rng, corpus, designer.document_words, skills=designer.skills)


def _offered(config: Config, corpus: Corpus) -> list[str]:
    """The rare words that designer prompts offer, the most frequent first."""
    shown = (excerpt(document, config.designer.document_words) for document in corpus)
    offered = Counter(term for text in shown for term in corpus.rare_terms(text)[:MAX_TERMS])
    return [word for word, _ in offered.most_common()]


def _texts(item: Grounded) -> tuple[str, str, str]:
    prompt = compact.designer(item.skill, item.difficulty, item.excerpt, item.terms, ())
    return prompt, item.draw.program, item.draw.hint


async def _plays(config: Config, corpus: Corpus, chat: Chat) -> list[Example]:
    """Expert plays, made once: each needs a worker, and they are short."""
    limits = Limits(**{f.name: getattr(config.envs, f.name) for f in dataclasses.fields(Limits)})
    async with Pool(limits) as pool:
        made = play_examples(
            config.run.seed,
            corpus,
            chat,
            pool,
            config.designer.document_words,
            config.agent.max_turns,
            config.warmstart.plays,
            config.designer.skills,
        )
        return [example async for example in made]


def _batches(
    config: Config, corpus: Corpus, chat: Chat, plays: Sequence[Example]
) -> Iterator[list[Example]]:
    """Endless lists of examples that together fill `warmstart.rows` rows: the copy exercises of the
    first steps, then the mixture of all kinds.
    """
    seed, settings, designer = config.run.seed, config.warmstart, config.designer
    copies = copy_examples(seed, _offered(config, corpus), chat)
    sources = {
        "text": text_examples(
            seed, corpus, chat, designer.document_words, config.memory, designer.skills
        ),
        "copy": copies,
        "play": _again(random.Random(f"batches/{seed}"), plays),
    }
    shares = {"text": settings.design_share, "copy": settings.copy_share}
    shares["play"] = 1 - sum(shares.values())
    yield from itertools.islice(_filled(config.warmstart, copies), settings.copy_steps)
    yield from _filled(config.warmstart, _mixed(sources, shares))


def _mixed(
    sources: Mapping[str, Iterator[Example]], shares: Mapping[str, float]
) -> Iterator[Example]:
    """Examples of all sources, each with its share of the tokens."""
    taught = dict.fromkeys(sources, 0)
    while True:
        kind = min(sources, key=lambda kind: taught[kind] / shares[kind])
        example = next(sources[kind])
        taught[kind] += len(example.tokens)
        yield example


def _filled(settings: WarmstartConfig, source: Iterator[Example]) -> Iterator[list[Example]]:
    """Lists of examples that fill the rows of a step; what does not fit opens the next list."""
    examples: list[Example] = []
    for example in source:
        if len(example.tokens) > settings.row_tokens:
            raise ConfigError(
                f"warmstart.row_tokens={settings.row_tokens} is shorter than an example of "
                f"{len(example.tokens)} tokens ({example.kind}); set it to at least that"
            )
        lengths = [len(item.tokens) for item in [*examples, example]]
        if len(pack(lengths, settings.row_tokens)) > settings.rows:
            yield examples
            examples = []
        examples.append(example)


def _again(rng: random.Random, plays: Sequence[Example]) -> Iterator[Example]:
    """Endless plays, each drawn anew from those made."""
    while True:
        yield plays[rng.randrange(len(plays))]


def _groups(examples: Sequence[Example]) -> list[Group]:
    """Examples as trajectories: nothing sampled them, so the log-probabilities are zeros that NLL
    does not read.
    """
    return [
        Group(
            example.role,
            example.kind,
            (
                Trajectory(
                    tokens=example.tokens,
                    loss_mask=example.loss_mask,
                    sampler_logprobs=np.zeros(len(example.tokens), np.float32),
                    untruncated_logprobs=np.zeros(len(example.tokens), np.float32),
                    turn_index=np.zeros(len(example.tokens), np.int16),
                    policy_version=0,
                    temperature=1.0,
                ),
            ),
            np.zeros(1, np.float32),
            np.zeros(1, np.float32),
        )
        for example in examples
    ]


def _line(
    config: Config,
    step: int,
    examples: Sequence[Example],
    metrics: dict[str, float],
    seconds: float,
) -> str:
    losses = " ".join(
        f"{role.value} {metrics[f'loss/{role}']:.3f}" for role in Role if f"loss/{role}" in metrics
    )
    tokens = sum(len(example.tokens) for example in examples)
    left = (config.warmstart.steps - step - 1) * seconds / 60
    return (
        f"step {step + 1}/{config.warmstart.steps}  loss: {losses}  grad norm "
        f"{metrics['optim/grad_norm']:.2f}  "
        f"{len(examples)} examples, {tokens / seconds:.0f} tokens/s, about {left:.0f} min left"
    )
