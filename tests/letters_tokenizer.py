"""A tokenizer for tiny models with random weights."""


class Letters:
    """Gives every letter of a prompt's beginning some id of a tiny model."""

    bos_token_id = None

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [3 + ord(letter) % 100 for letter in text[:24]]
