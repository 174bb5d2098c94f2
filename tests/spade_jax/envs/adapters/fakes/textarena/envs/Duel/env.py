class DuelEnv:
    """For two players."""
