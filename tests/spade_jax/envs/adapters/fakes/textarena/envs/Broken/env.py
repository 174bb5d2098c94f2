raise RuntimeError("a SinglePlayerState(game) that this Python cannot import")
