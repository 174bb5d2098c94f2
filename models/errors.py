"""The one exception of the model package; the CLI turns it into one line and exit code 2."""


class ModelError(Exception):
    """A model, tokenizer, mesh or weight file cannot be used; the message says why and what to
    change.
    """
