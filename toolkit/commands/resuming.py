"""How to go on with a command that was interrupted and left finished parts."""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from click.core import ParameterSource

from ..printing import echo


@contextlib.contextmanager
def telling_how_to_resume(kept: Path) -> Iterator[None]:
    """Say the very command on stderr where the block is interrupted and leaves `kept`, a folder."""
    try:
        yield
    except KeyboardInterrupt:
        if kept.is_dir():
            echo(f"finished parts are kept in {kept}; go on with: {given_command()}", err=True)
        raise


def given_command() -> str:
    """The command that is running, with the options it was given, as a shell takes it."""
    context = click.get_current_context()
    words = ["omnidraft-npu", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        option = max(parameter.opts, key=len)
        if isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(option)
        else:
            for one in value if isinstance(value, tuple) else (value,):
                words += [option, str(one)]
    return shlex.join(words)
