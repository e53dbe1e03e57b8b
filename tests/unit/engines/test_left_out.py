"""Engines that the launcher leaves out: it started them, and does not start them again for now."""

from __future__ import annotations

import pytest

from tests.unit.engines.test_membership import Job


@pytest.mark.parametrize("noticed", [True, False])
async def test_an_engine_of_the_launchers_that_is_left_out_has_left_whoever_noticed_its_death_first(
    noticed,
):
    job = Job()
    async with job.membership:
        await job.serving("a")
        index = job.roster.announce("b")
        await job.until(lambda: "b" in job.engines, "the membership sees it")
        job.engines["b"].answers.set()
        await job.until(lambda: job.membership._members[index].state == "ready", "it is ready")
        if noticed:
            await job.membership.report_lost(job.engines["b"], "killed")
            assert job.roster.replacement_wanted(index, 0), "the launcher is asked first"
            job.roster.ask_leave(index)
        else:
            job.roster.ask_leave(index)
            await job.until(
                lambda: (
                    job.roster.has_left(index) or job.membership._members[index].state == "leaving"
                ),
                "seen",
            )
            await job.membership.report_lost(job.engines["b"], "killed")
        await job.until(lambda: job.roster.has_left(index), "it has left")
        assert job.membership.size == 1
        again = job.roster.announce("b")
        await job.until(
            lambda: again in job.membership._members, "at a place of its own it is welcome again"
        )


async def test_an_engine_that_was_started_again_on_another_node_is_asked_there():
    job = Job()
    async with job.membership:
        index = job.roster.announce("a")
        await job.until(lambda: "a" in job.engines, "the membership sees it")
        job.roster.renew(index, 1, "b")
        await job.until(lambda: "b" in job.engines, "the membership asks at the new address")
        assert job.membership._members[index].generation == 1
