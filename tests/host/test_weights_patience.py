"""How long the Hub is waited for: as it names it, in every form, bounded; all streams together; seen, stoppable."""

import email.utils
import os
import re
import signal
import threading
import time
from collections import Counter

import httpx2
import pytest
from hub_server import Fault
from hypothesis import given
from hypothesis import strategies as st
from small_packs import read_folder

from launcher.errors import Exit
from launcher.weights import patience
from launcher.weights.patience import LONGEST_NAMED_WAIT_S, Gate, Passing, Stopped, wait_of

FULL = {"RateLimit": '"api";r=0;t=243', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
DATE = "Tue, 01 Sep 2026 12:00:00 GMT"
LATER = "Tue, 01 Sep 2026 12:01:30 GMT"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7),
        ({"retry-after": " 7 "}, 7),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": LATER, "Date": DATE}, 90),
        ({"Retry-After": DATE, "Date": LATER}, 0),  # in the past: at once
        ({"Retry-After": "Tue, 01 Sep 2026 12:01:30 -0000", "Date": DATE}, 90),  # of no zone: UTC
        (FULL, 244),
        ({"ratelimit": '"api";r=0;t=243'}, 244),
        ({"RateLimit": '"api" ; r = 0 ; t = 243'}, 244),
        ({"RateLimit": '"api";t=243;r=0;pk=:YWJj:'}, 244),
        ({"RateLimit": '"a,b;r=0;t=9";r=5;t=30, "day";r=0;t=100, "hour";r=0;t=60'}, 101),  # the last of the used up
        ({"RateLimit": '"api";r=17;t=243'}, None),  # something is left: it was not this limit
        ({"RateLimit": '"api";r=0;t=243', "Retry-After": "2"}, 244),  # the longer one
        ({"RateLimit": '"api";r=0;t=1', "Retry-After": "30"}, 30),
        ({"RateLimit": '"api";r=0'}, None),
        ({"RateLimit": '"api";r=0;t=-4'}, None),
        ({"Retry-After": "86400"}, LONGEST_NAMED_WAIT_S),
        ({"RateLimit": '"api";r=0;t=999999999999'}, LONGEST_NAMED_WAIT_S),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "9" * 400}, None),
        ({"Retry-After": "nan"}, None),
    ],
)
def test_a_named_wait_is_read_in_every_form(headers, seconds):
    assert wait_of(429, httpx2.Headers(headers)).seconds == seconds


def test_a_date_goes_by_this_machines_clock_without_the_servers():
    wait = wait_of(503, {"Retry-After": email.utils.formatdate(time.time() + 60, usegmt=True)})
    assert 55 <= wait.seconds <= 60


def test_a_limit_counts_only_where_it_can_be_the_reason():
    assert wait_of(500, httpx2.Headers(FULL)).seconds is None
    assert wait_of(503, httpx2.Headers(FULL)).seconds == 244


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (FULL, "its limit is 500 requests in 5 min"),
        ({"Retry-After": "86400"}, "it asks for 24 h 0 min, and is asked again after 15 min"),
        ({"Retry-After": "-5"}, "its Retry-After '-5' is no time"),
        ({}, ""),
    ],
)
def test_what_was_named_is_told(headers, said):
    assert wait_of(429, httpx2.Headers(headers)).said == said


NAMES = st.sampled_from(["Retry-After", "RateLimit", "RateLimit-Policy", "Date"])


@given(NAMES, st.text(max_size=40), st.text('0123456789;rtqw=", ', max_size=40))
def test_no_header_breaks_it_or_is_waited_for_without_end(name, text, more):
    headers = {"Retry-After": "soon", "RateLimit": more, name: text}
    seconds = wait_of(429, headers).seconds
    assert seconds is None or 0 <= seconds <= LONGEST_NAMED_WAIT_S


# Together


def test_a_gate_is_news_once():
    now = [100.0]
    gate = Gate(lambda: now[0])
    assert gate.shut(243) and not gate.shut(242) and not gate.shut(243.5) and gate.shut(300)
    assert gate.text() == "; waits for the Hub, 5:00 left"
    now[0] += 300
    assert gate.left_s == 0 and gate.text() == "" and gate.shut(1)


def test_a_shut_gate_ends_with_the_download():
    gate, stop = Gate(), threading.Event()
    gate.shut(100)
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        gate.pass_through(stop)
    assert time.monotonic() - began < 3


def test_a_wait_that_was_named_is_kept_between_attempts(monkeypatch):
    monkeypatch.setattr(patience, "GATE", Gate())
    tries = []

    def attempt():
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise Passing("HTTP 429", 429, patience.Wait(0.3))

    patience.patiently("x", attempt, threading.Event(), lambda: 0, 8)
    assert tries[1] - tries[0] >= 0.3


# Downloads

LIMIT = {"RateLimit": '"resolvers";r=0;t=0', "RateLimit-Policy": '"fixed window";"resolvers";q=3000;w=300'}
BUSY = "; trying again in 1 s"


def test_all_streams_wait_together_and_it_is_said_once(hub_machine):
    files = hub_machine.publish(shards=6)
    asked_at = []
    fault = Fault("/resolve/", times=4, status=429, headers=LIMIT)
    fault.takes = timed(fault.takes, asked_at)
    hub_machine.hub.faults = [fault]
    said = hub_machine.must("--streams", "4")
    assert read_folder(hub_machine.model) == files
    lines = [line for line in said.splitlines() if "trying again" in line]
    assert len(lines) <= 2 and all(
        "HTTP 429 (its limit is 3000 requests in 5 min); trying again in 1 s" in line for line in lines
    )
    assert all("all streams together" in line for line in lines)
    # Those that were under way were refused, too; then nobody asked for a second.
    refused = 4
    assert asked_at[refused] - asked_at[0] >= 0.9


def timed(takes, asked_at):
    def wrapped(path):
        if re.search("/resolve/", path):
            asked_at.append(time.monotonic())
        return takes(path)

    return wrapped


def test_a_limit_while_listing_is_waited_for(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/tree/", status=429, headers=LIMIT)]
    began = time.monotonic()
    said = hub_machine.must()
    assert time.monotonic() - began >= 1
    assert re.search(r"first/model: HTTP 429 \(its limit .*\); trying again in 1 s \(1 of 5\)", said)
    assert read_folder(hub_machine.model) == files


def test_a_resumed_stream_waits_too_and_nothing_comes_twice(hub_machine):
    files = hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/lfs/", cut=20_000), Fault("/lfs/", status=503, headers={"Retry-After": "1"})]
    assert "HTTP 503; trying again in 1 s" in hub_machine.must("--streams", "1")
    assert hub_machine.hub.sent == Counter({name: len(content) for name, content in files.items()})


@pytest.mark.parametrize("path", ["/tree/", "/resolve/"])
def test_a_limit_without_end_is_no_fault_of_the_network(hub_machine, monkeypatch, path):
    hub_machine.publish(shards=3)
    monkeypatch.setattr(patience, "ATTEMPTS", 2)
    hub_machine.hub.faults = [Fault(path, status=429, headers={"Retry-After": "0"}, times=99)]
    done = hub_machine.call()
    assert done.code == Exit.REFUSED
    assert "The Hub limits how often you may ask, and more often with a login (HF_TOKEN" in done.said
    assert "network" not in done.said


def test_a_server_that_stays_busy_is_no_fault_of_the_network(hub_machine):
    hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault("/tree/", status=503, times=99)]
    done = hub_machine.call()
    assert done.code == Exit.REFUSED and "The server there is busy or broken" in done.said
    assert "network" not in done.said


@pytest.mark.parametrize("path", ["/tree/", "/resolve/"])
def test_a_long_wait_is_seen_and_ctrl_c_ends_it(hub_machine, path):
    """Without a terminal the line of progress comes each half a minute; the sentence comes at once."""
    hub_machine.publish(shards=3)
    hub_machine.hub.faults = [Fault(path, status=429, headers=FULL, times=99)]
    running = hub_machine.start(before=on_a_terminal)
    deadline = time.monotonic() + 30
    while "waits for the Hub, 4:0" not in running.said and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "trying again in 244 s" in running.said and "waits for the Hub, 4:0" in running.said
    began = time.monotonic()
    os.kill(running.process.pid, signal.SIGINT)
    done = running.wait()
    assert time.monotonic() - began < 10
    assert done.code == Exit.INTERRUPTED and "Interrupted; what has arrived is kept" in done.said


def on_a_terminal():
    import sys

    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell gives, even where the tests run under nohup
    sys.stderr.isatty = lambda: True


@pytest.mark.parametrize("is_there", [True, False])
def test_the_library_says_and_waits_nothing_of_its_own(hub_machine, monkeypatch, is_there):
    hub_machine.publish(shards=3)
    said, waits = [], []
    monkeypatch.setattr("huggingface_hub.utils._http.logger.warning", said.append)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    hub_machine.hub.faults = [Fault("/tree/", times=2, status=503), Fault("/tree/", times=1, status=429)]
    if not is_there:
        hub_machine.hub.close()
    done = hub_machine.call()
    assert said == [] and not any(waits) and "trying again in" in done.said
