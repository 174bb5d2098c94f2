"""`spade-jax generate`: talk with a policy in the terminal, or complete a file of prompts.

The policy is sampled by the engine that self-play uses. All input is checked before weights are
read or anything is compiled. Tools, a server, and devices that each complete prompts of their own
are not here.
"""

from spade_jax.errors import SpadeError
from spade_jax.generate.batch import complete
from spade_jax.generate.conversation import Conversation
from spade_jax.generate.files import Completions
from spade_jax.generate.options import Options
from spade_jax.generate.policy import Policy
from spade_jax.rollout.sampling import check_params

__all__ = ["Options", "generate"]


def generate(options: Options) -> int:
    """Run the command; returns the exit code: 0 done, 1 some prompts failed, 130 interrupted.

    Raises:
        SpadeError, ModelError: something given cannot be used.
    """
    if (options.prompts is None) != (options.out is None):
        given, lacking = ("--prompts", "--out") if options.prompts else ("--out", "--prompts")
        raise SpadeError(f"{given} needs {lacking}: both for a file of prompts, neither to talk")
    if not all(options.stop):
        raise SpadeError("--stop '' is in every text; give a string that ends a completion")
    policy = Policy(options)
    check_params(policy.sampling(()))
    if options.prompts is None or options.out is None:
        return Conversation(policy, options).run()
    prompts = policy.read(options.prompts)
    with Completions(options.out, overwrite=options.overwrite, inputs=[options.prompts]) as out:
        return complete(policy, options, prompts, out)
