"""What the agent reads first, the same text in both arms but for the hint."""

AGENT = """Play the game. Think briefly, then put one action in \\boxed{{}}.
{observation}"""

HINT_LABEL = "\nHINT: "


def first_observation(observation: str, hint_text: str | None) -> str:
    """First message of an episode; the two arms differ by the hint line alone."""
    return AGENT.format(observation=observation + (HINT_LABEL + hint_text if hint_text else ""))
