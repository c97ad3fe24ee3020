"""Errors that the user can fix; the command line shows each as one line.

A message says what is wrong, with the value; why it matters, if that is not
obvious; and what to do next.
"""


class OmniDraftError(Exception):
    """Base of every error the user can fix."""

    exit_code = 1


class ConfigError(OmniDraftError, ValueError):
    """An option or a configuration field has a value that cannot be used."""

    exit_code = 2


class CheckpointError(OmniDraftError):
    """A checkpoint cannot be read or is not supported."""


class TokenizerError(OmniDraftError):
    """A tokenizer cannot be read, rebuilt or used with this model."""


class StoreError(OmniDraftError):
    """A model is not in the local store and could not be brought there."""


class DamagedModelError(StoreError):
    """A model in the local store is not what was fetched."""


class ExportError(OmniDraftError):
    """A bundle could not be written."""


class PromptError(OmniDraftError, ValueError):
    """A prompt cannot be decoded, templated or fitted into the context."""


class DeviceError(OmniDraftError):
    """The strict device that was asked for is not available."""

    exit_code = 4


class BundleError(OmniDraftError):
    """A bundle is damaged, or does not match this tool, chip or provider."""

    exit_code = 5


class StateError(OmniDraftError):
    """What a bundle has learned cannot be changed now."""


class ResourceError(OmniDraftError):
    """This machine has too little memory, or may start too few threads."""


class BusyError(StateError):
    """Another process is changing it: later it can be changed."""
