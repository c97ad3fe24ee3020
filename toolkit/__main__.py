"""`python -m omnidraft_npu`: the command line, where its script is not on the path."""

from .cli import cli

if __name__ == "__main__":
    cli(prog_name="omnidraft-npu")
