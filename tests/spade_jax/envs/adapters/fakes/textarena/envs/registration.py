from types import SimpleNamespace

ENV_REGISTRY = {
    name: SimpleNamespace(entry_point=f"textarena.envs.{place}.env:{place}Env")
    for name, place in (
        ("Dice-v0", "Dice"),
        ("Dice-v0-raw", "Dice"),
        ("Dice-v0-train", "Dice"),
        ("Dice-v0-long-raw", "Dice"),
        ("Duel-v0-raw", "Duel"),
        ("Broken-v0-raw", "Broken"),
    )
}
