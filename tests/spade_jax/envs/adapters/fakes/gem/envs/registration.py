from types import SimpleNamespace

from gem import games

ENV_REGISTRY = {
    name: SimpleNamespace(entry_point="gem.games:FlipEnv")
    for name in ("game:Flip-v0-easy", "game:Flip-v0-hard", "rg:sums")
}


def make(name, **options):
    return games.FlipEnv(**options)
