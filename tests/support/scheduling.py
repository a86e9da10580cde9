"""Distribution of tests over pytest-xdist's processes: whole files, then the tests marked `alone`.

A file stays in one process, so that its fixtures are set up once. Tests marked `alone` measure time or
memory: the last process runs them one after the other when all other processes have finished.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

GROUP = "alone"
"""The group of the tests marked `alone`; pytest-xdist appends it to their ids."""


class FilesThenAlone(LoadGroupScheduling):
    """A queue of files in the order of collection, which has the group `alone` at its end."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        if super()._split_scope(nodeid) == GROUP:
            return GROUP
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if next(iter(self.workqueue)) == GROUP:
            others = [each for each in self.nodes if each is not node]
            if not all(each.shutting_down for each in others):
                node.shutdown()  # one of the others is the last
                return
            if others:
                return  # until `remove_node` was called for each
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        crashed = super().remove_node(node)
        if self.workqueue:
            for each in self.nodes:
                self._reschedule(each)
        return crashed
