"""What a broken or lying model file raises."""


class BadCheckpoint(ValueError):
    """A model file or folder that cannot be read; the message names what is wrong with it."""
