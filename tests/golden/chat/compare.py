"""Compare our token pieces with an official chat template over random conversations.

    python tests/golden/chat/compare.py FOLDER [--count 300] [--features system tools thinking]

FOLDER holds the real `tokenizer.json` and `tokenizer_config.json`. Needs transformers and jinja2
beside this project. Prints how many conversations are equal token by token as they are, how many
once the thinking is taken out that the official template drops, and the first that differ.
"""

import argparse
import random

from conversations import conversation, official, ours, without_dropped_thinking
from transformers import PreTrainedTokenizerFast

from models.tokenizer import load_tokenizer
from spade_jax.rollout.chat import Chat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--features", nargs="*", default=["system", "tools", "thinking"])
    arguments = parser.parse_args()
    peer = PreTrainedTokenizerFast.from_pretrained(arguments.folder)
    chat = Chat(load_tokenizer(arguments.folder))
    rng = random.Random(arguments.seed)
    same = less = turns = tokens = 0
    for index in range(arguments.count):
        talk = conversation(rng, set(arguments.features))
        theirs, mine = official(peer, talk), ours(chat, talk)
        bare = without_dropped_thinking(chat, talk, mine)
        turns += len(talk["messages"])
        tokens += len(theirs)
        same += mine == theirs
        less += mine != theirs and bare == theirs
        if bare != theirs:
            at = next(i for i, (a, b) in enumerate(zip(bare, theirs, strict=False)) if a != b)
            print(f"conversation {index} differs at token {at}: {talk}")
            for name, ids in (("ours", bare), ("peer", theirs)):
                near = ids[max(at - 5, 0) : at + 10]
                print(" ", name, [(index, chat.tokenizer.piece(index)) for index in near])
    print(
        f"{chat.template.name}: {arguments.count} conversations, {turns} messages, "
        f"{tokens} tokens: "
        f"{same} equal, {less} equal without the thinking that the template drops, "
        f"{arguments.count - same - less} different"
    )
    return int(same + less != arguments.count)


if __name__ == "__main__":
    raise SystemExit(main())
