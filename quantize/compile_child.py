"""Makes context binaries in a process of its own: QNN keeps state, and a fault of its kills.

The process ends with the one that started it: that holds the other end of its stdin.
"""

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from omnidraft_npu.errors import OmniDraftError
from omnidraft_npu.qnn.provider import open_qnn_session

FAILED = 3
"""Exit code where the last line on stderr says what is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Compile what one JSON argument says; see `compile.CompileJob`."""
    job = json.loads(arguments[0])
    sessions = []
    for i, (source, output) in enumerate(job["graphs"]):
        config = {
            "ep.context_enable": "1",
            "ep.context_embed_mode": "0",
            "ep.context_file_path": output,
        }
        if job["share_weights"]:
            config["ep.share_ep_contexts"] = "1"
            if i == len(job["graphs"]) - 1:
                config["ep.stop_share_ep_contexts"] = "1"
        try:
            session = open_qnn_session(
                Path(source),
                soc_model=job["soc_models"][0],
                simulate=True,
                options={"soc_model": ",".join(map(str, job["soc_models"]))},
                config=config,
            )
        except OmniDraftError as error:
            sys.stderr.write(f"\n{error}\n")
            return FAILED
        # What is shared is written when the last of them is made: the others must live till then.
        sessions.append(session)
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(FAILED)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
