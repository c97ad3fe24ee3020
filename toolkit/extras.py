"""How to install what not every installation of this package has."""


def install_hint(*extras: str) -> str:
    """The command for extras of `pyproject.toml`; the package is installed from its clone."""
    return f"in the clone of omnidraft-npu, pip install '.[{','.join(extras)}]'"
