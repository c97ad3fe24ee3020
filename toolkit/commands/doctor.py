"""`omnidraft-npu doctor`: what of the NPU works on this machine."""

import dataclasses

import click

from ..printing import echo, echo_json


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool) -> None:
    """Check versions, libraries and backends, and why there is no NPU where there is none.

    Every backend is tried in a process of its own, so that one that crashes or hangs does no
    harm. Each line that is wrong ends with what to do.

    Exit code 0: nothing is wrong; 1: something is.

    \b
    Examples:
      omnidraft-npu doctor
      omnidraft-npu doctor --json
    """
    from ..qnn.diagnosis import diagnose

    findings = []
    for finding in diagnose():
        findings.append(finding)
        if not as_json:
            fix = f": {finding.fix}" if finding.fix else ""
            echo(f"{finding.status:<5} {finding.name}: {finding.found}{fix}")
    is_ok = all(finding.status != "wrong" for finding in findings)
    if as_json:
        document = {
            "schema_version": 1,
            "is_ok": is_ok,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        echo_json(document)
    if not is_ok:
        raise click.exceptions.Exit(1)
