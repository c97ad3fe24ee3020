"""Work in named stages inside one folder: a stage is finished, or its files are gone."""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnidraft_npu.documents import read_document
from omnidraft_npu.errors import ExportError
from omnidraft_npu.files import write_json
from omnidraft_npu.progress import Report

logger = logging.getLogger(__name__)

_MARKS = ".stages"
_AGAIN = "what an earlier run finished there is done again"

Facts = dict[str, Any]
Tell = Callable[[int, int], None]
"""Called inside a stage with the items done and their total."""


class Stages:
    """Finished stages of one piece of work, taken over by a later run of the same work."""

    def __init__(self, root: Path, identity: Facts) -> None:
        """Open or begin the work in `root`.

        Args:
            root: Folder the stages write to; anything in it made for other work is dropped.
            identity: What the work is; finished stages count only where it is equal.
        """
        self.root = root
        self.seconds: dict[str, float] = {}
        self._identity = identity
        self._marks = root / _MARKS
        self._has_begun = False

    def run(
        self,
        name: str,
        folder: str,
        work: Callable[[Path, Tell], Facts],
        progress: Report,
        *,
        is_file: bool = False,
    ) -> Facts:
        """Do `work` into ``root / folder``, or give what an earlier run found.

        Args:
            name: What `progress` is told of.
            folder: Of the stage alone, or with `is_file` one file beside those of other stages.
            work: Called with the empty folder, or with the path where the file is to be.
            progress: Told how far it is.
            is_file: See `folder`.

        Returns:
            The facts `work` returned; they must survive JSON.
        """
        self._begin()
        # No name of a model has a plus, so no two folders have one mark.
        mark = self._marks / (folder.replace("/", "+") + ".json")
        if mark.exists():
            try:
                return read_document(mark, dict[str, Any], error=ExportError, advice=_AGAIN)
            except ExportError as error:
                logger.warning("%s", error)
        started = time.perf_counter()
        target = self.root / folder
        _remove(target)
        (target.parent if is_file else target).mkdir(parents=True, exist_ok=is_file)
        try:
            facts = work(target, lambda done, total: progress(name, done, total))
        except BaseException:
            _remove(target)
            raise
        write_json(mark, facts)
        self.seconds[name] = time.perf_counter() - started
        return facts

    def scratch(self, name: str) -> Path:
        """A place that outlives an interruption, for what a stage takes up again."""
        return self._marks / "scratch" / name

    def files(self) -> list[Path]:
        """Every file the stages wrote, in a stable order."""
        return sorted(p for p in self.root.rglob("*") if p.is_file() and _MARKS not in p.parts)

    @staticmethod
    def forget(folder: Path) -> None:
        """Drop the book-keeping that a finished folder still holds."""
        shutil.rmtree(folder / _MARKS, ignore_errors=True)

    def discard(self) -> None:
        """Drop everything; what an earlier run left stays if this one ran no stage."""
        if self._has_begun:
            shutil.rmtree(self.root, ignore_errors=True)

    def discard_if_empty(self) -> None:
        """Drop everything unless some stage is finished."""
        if not self._has_finished():
            self.discard()

    def advice(self) -> str:
        """What a user may do after a failure, for the end of a message."""
        if self._has_finished():
            return f"finished parts are kept in {self.root}; mend it and run the same command again"
        return "nothing was left behind"

    def _has_finished(self) -> bool:
        return any(mark.name != "identity.json" for mark in self._marks.glob("*.json"))

    def _begin(self) -> None:
        path = self._marks / "identity.json"
        is_same = False
        if path.exists():
            try:
                found = read_document(path, dict[str, Any], error=ExportError, advice=_AGAIN)
                is_same = found == self._identity
            except ExportError as error:
                logger.warning("%s", error)
        if not self._has_begun and self._has_finished():
            if is_same:
                logger.info("taking over what an earlier run finished in %s", self.root)
            else:
                logger.warning("dropping %s: it was made with other options", self.root)
        self._has_begun = True
        if is_same:
            return
        shutil.rmtree(self.root, ignore_errors=True)
        self._marks.mkdir(parents=True)
        write_json(path, self._identity)


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
