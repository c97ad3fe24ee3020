"""What is text: nothing but whole Unicode characters."""


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8; half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
