"""What a model wrote, made fit to be shown."""


def printable(text: str) -> str:
    """Without what would move a terminal's cursor, or turn the direction of what follows."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
