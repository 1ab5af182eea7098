"""The live screen, driven by Textual's pilot."""

from __future__ import annotations

import asyncio

import pytest
from textual.widgets import Input, Log, Static

from gpurun.errors import NotYours
from gpurun.jobs.record import State
from gpurun.quantities import duration
from gpurun.views.app import Actions, Question, TopApp

HOSTILE = "[red]x[/red]\x1b[2J[@click=app.quit]"


class Screen:
    """The app under a pilot, and what its keys did."""

    def __init__(self, cluster, pilot, app, done):
        self.cluster, self.pilot, self.app, self.done = cluster, pilot, app, done

    async def press(self, *keys):
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def refresh(self):
        self.app._drawn_s = -1e9  # figures are due
        self.app.refresh_all()
        await self.pilot.pause()

    def rows(self, name):
        table = self.app._table(name)
        return [[str(cell) for cell in table.get_row_at(at)] for at in range(table.row_count)]

    @property
    def summary(self):
        return str(self.app.query_one("#summary", Static).render())

    @property
    def log(self):
        return list(self.app.query_one("#log", Log).lines)


@pytest.fixture
def drive(cluster):
    def run(scene, size=(120, 40)):
        async def whole():
            done = []

            def cancel(job):
                if job == "j-00000002":
                    raise NotYours("belongs to bob", job=job, hint="ask them")
                done.append(("cancel", job))
                return "asked"

            app = TopApp(cluster, Actions(cancel, lambda host: done.append(("cordon", host)) or "cordoned"), duration)
            async with app.run_test(size=size) as pilot:
                await pilot.pause()
                await scene(Screen(cluster, pilot, app, done))

        asyncio.run(whole())

    return run


def test_jobs_queue_and_hosts_are_shown_and_a_silent_host_is_named(drive):
    async def scene(screen):
        jobs = screen.rows("jobs")
        assert [row[1] for row in jobs] == ["j-00000001", "j-00000002", "j-00000003"]
        assert jobs[0][6:8] == ["97 %", "32 of 64 GiB"] and jobs[1][6] == "–"
        assert "2 of 8 GPUs free" in screen.summary and "no answer from n3" in screen.summary
        await screen.press("2")
        assert screen.rows("queue")[0][-1] == "waits for 60 more GPUs"
        await screen.press("3")
        hosts = {row[0]: row for row in screen.rows("hosts")}
        assert hosts["n1"][3:5] == ["aa", "97 97"]
        assert hosts["n3"][4] == "no answer" and "timed out" in hosts["n3"][-1]
        assert hosts["n4"][4] == "not leased: not asked"

    drive(scene)


def test_news_arrive_and_the_selected_job_stays_selected(drive):
    async def scene(screen):
        await screen.press("down")
        screen.cluster.percent = 12
        screen.cluster.states[1] = State.FAILED
        await screen.refresh()
        assert [row[1] for row in screen.rows("jobs")] == ["j-00000002", "j-00000003", "j-00000001"]
        assert screen.app._job() == "j-00000002"
        assert screen.rows("jobs")[2][6] == "12 %"

    drive(scene)


def test_figures_wait_for_their_turn_and_states_do_not(drive):
    async def scene(screen):
        screen.cluster.percent = 12
        screen.app.refresh_all()
        assert screen.rows("jobs")[0][6] == "97 %"
        screen.cluster.states[2] = State.STOPPING
        screen.app.refresh_all()
        assert screen.rows("jobs")[0][6] == "12 %" and screen.rows("jobs")[1][4] == "STOPPING"

    drive(scene)


def test_the_log_of_the_selected_job_follows_or_stands_still(drive):
    async def scene(screen):
        screen.cluster.logs = {"j-00000001": ["one"], "j-00000002": ["other"]}
        await screen.refresh()
        assert screen.log == ["one"]
        screen.cluster.logs["j-00000001"] = ["one", "two"]
        await screen.refresh()
        assert screen.log == ["one", "two"]
        await screen.press("f")
        screen.cluster.logs["j-00000001"] = ["one", "two", "three"]
        await screen.refresh()
        assert screen.log == ["one", "two"]
        await screen.press("down")
        assert screen.log == ["other"]

    drive(scene)


@pytest.mark.parametrize(("answer", "done"), [("y", [("cancel", "j-00000001")]), ("n", []), ("escape", [])])
def test_cancel_asks_first(drive, answer, done):
    async def scene(screen):
        await screen.press("c")
        assert isinstance(screen.app.screen, Question)
        screen.cluster.percent = 3
        await screen.refresh()  # news do not wait for the answer
        assert screen.rows("jobs")[0][6] == "3 %"
        await screen.press(answer)
        await screen.app.workers.wait_for_complete()
        assert screen.done == done and screen.cluster.hurried == len(done)

    drive(scene)


def test_what_cannot_be_done_is_said_and_the_screen_goes_on(drive):
    async def scene(screen):
        await screen.press("down", "c", "y")
        await screen.app.workers.wait_for_complete()
        await screen.pilot.pause()
        assert screen.done == [] and screen.app.is_running
        assert any("belongs to bob" in str(note.message) for note in screen.app._notifications)

    drive(scene)


def test_cordon_is_for_hosts(drive):
    async def scene(screen):
        await screen.press("o")
        assert screen.done == [] and not isinstance(screen.app.screen, Question)
        await screen.press("3", "down", "o", "y")
        await screen.app.workers.wait_for_complete()
        assert screen.done == [("cordon", "n2")]

    drive(scene)


def test_sort_and_filter(drive):
    async def scene(screen):
        await screen.press("s", "s", "s")
        assert screen.rows("jobs")[0][1] == "j-00000001" and "sorted by use" in screen.summary
        await screen.press("slash", *"bert", "enter")
        assert [row[3] for row in screen.rows("jobs")] == ["bert"] and "only 'bert'" in screen.summary
        await screen.press("escape")
        assert len(screen.rows("jobs")) == 3 and not screen.app.query_one("#filter", Input).value

    drive(scene)


@pytest.mark.parametrize("size", [(40, 12), (20, 8), (200, 60)])
def test_it_is_shown_at_any_size_and_after_a_change_of_it(drive, size):
    async def scene(screen):
        await screen.pilot.resize_terminal(100, 30)
        await screen.press("2", "3", "1")
        await screen.pilot.resize_terminal(*size)
        await screen.refresh()
        assert len(screen.rows("jobs")) == 3

    drive(scene, size)


def test_hostile_names_and_logs_are_texts(drive, cluster):
    cluster.names = dict.fromkeys((1, 2, 3), HOSTILE)
    cluster.logs = {"j-00000001": [HOSTILE.replace("\x1b", "\\x1b")]}
    cluster.problems = (HOSTILE,)

    async def scene(screen):
        assert screen.rows("jobs")[0][3] == HOSTILE.replace("\x1b", "\\x1b")
        assert HOSTILE.replace("\x1b", "\\x1b") in screen.summary and screen.log == cluster.logs["j-00000001"]

    drive(scene)
