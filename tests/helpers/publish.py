"""The coordinator's end of a publish with trainers that send only at borders."""

from __future__ import annotations

from pa_npu.engines.member import Member
from pa_npu.publish.coordinator_side import CoordinatorPublish


class ServesNobodyLate(CoordinatorPublish):
    """A publish whose trainers give nobody a version inside an iteration."""

    async def deliver_late(self, member: Member, version: int) -> bool:
        return False
