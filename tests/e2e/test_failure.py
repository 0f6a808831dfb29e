"""On any rank's failure all ranks end, non-zero, within seconds, and the first cause is the last thing printed.

srun's variables stand for the hardest case: nobody but the ranks themselves ends a peer.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from stack.dist.env import RankEnv
from stack.dist.failure import clear_errors, describe
from stack.dist.hub import Channel, Hub
from stack.dist.signals import Stopped
from stack.errors import DataError
from tests.launchers import launch, start

SCRIPT = "tests/e2e/failing_rank.py"
LIMIT_S = 120  # seconds; 2 to 10 on a free machine, most of them for importing torch and DeepSpeed's launcher


@pytest.mark.parametrize(
    ("way", "last_line", "codes"),
    [
        ("bad setting", "  - parallel.sp=3: expected a divisor of 2. Fix: parallel.sp=2", (1, 1)),
        ("bad setting seen late", "  - parallel.sp=3: expected a divisor of 2. Fix: parallel.sp=2", (1, 1)),
        ("bad data", "error: line 3 of a.txt is broken. Fix: mend it", (1, 1)),
        ("raise", "ValueError: something unforeseen", (1, 1)),
        ("raise first", "ValueError: something unforeseen", (1, 1)),
        ("late", "ValueError: something unforeseen", (1, 1)),
        ("killed", "error: rank 1 of 2 on ", (1, -signal.SIGKILL)),
        ("killed first", "error: rank 0 of 2 on ", (-signal.SIGKILL, 1)),
        ("stopped", "error: stopped by SIGTERM", (143, 143)),
        ("exit", "left with 3", (3, 3)),
    ],
)
def test_all_ranks_end_and_the_cause_is_last(way: str, last_line: str, codes: tuple[int, int]) -> None:
    ended = launch("srun", [SCRIPT, way], timeout_s=LIMIT_S)
    assert tuple(ended.codes) == codes, ended.output
    lines = [line for line in ended.output.splitlines() if not line.startswith("(seen by rank")]
    assert last_line in lines[-1]
    assert ended.output.count(last_line) == 1
    assert ("Traceback" in ended.output) == last_line.startswith("ValueError")


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_cause_is_the_last_that_ranks_print_under(launcher: str) -> None:
    ended = launch(launcher, [SCRIPT, "raise"], timeout_s=LIMIT_S)
    assert ended.codes == [1]
    text = ended.output
    assert text.count("ValueError: something unforeseen") == 1
    after = text.partition("ValueError: something unforeseen")[2].splitlines()[1]
    assert after.startswith(("[20", "E", "W")), "a line of a rank follows the cause"


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "srun"])
def test_fault_of_all_ranks_is_told_though_the_first_comes_last(launcher: str) -> None:
    ended = launch(launcher, [SCRIPT, "first comes late"], timeout_s=LIMIT_S)
    assert all(ended.codes), ended.output
    assert ended.output.count("parallel.sp=3: expected a divisor of 2") == 1
    assert "SIGTERM" not in ended.output.partition("torch/distributed/elastic")[0]


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "plain"])
def test_clean_end(launcher: str) -> None:
    ended = launch(launcher, [SCRIPT, "ok"], timeout_s=LIMIT_S)
    assert set(ended.codes) == {0}, ended.output
    assert ended.output.count(" left") == (1 if launcher == "plain" else 2)


@pytest.mark.parametrize(("launcher", "number"), [("deepspeed", 15), ("torchrun", 9)])
def test_ranks_notice_that_their_launcher_is_gone(launcher: str, number: int) -> None:
    with start(launcher, [SCRIPT, "stuck"]) as started:
        started.wait_for("now stuck", LIMIT_S)
        family = started.everything()
        started.processes[0].send_signal(number)
        gone, alive = psutil.wait_procs(family, timeout=LIMIT_S)
        assert not alive and len(gone) >= 3
        assert f"the {launcher} launcher" in started.output or "SIGTERM" in started.output


@pytest.mark.parametrize(
    ("launcher", "number", "reason", "code"),
    [
        ("deepspeed", signal.SIGUSR1, "the deepspeed launcher (process [", -signal.SIGUSR1),
        ("torchrun", signal.SIGTERM, "SIGTERM", 1),
    ],
)
def test_signal_to_the_launcher_becomes_a_wish_of_ranks_at_work(
    launcher: str, number: int, reason: str, code: int
) -> None:
    """deepspeed's command dies of it, and its ranks notice; torchrun passes it on. They end by themselves in both cases."""
    with start(launcher, [SCRIPT, "asked"]) as started:
        started.wait_for("at work", LIMIT_S)
        family = started.everything()
        started.processes[0].send_signal(number)
        assert started.processes[0].wait(LIMIT_S) == code
        _, alive = psutil.wait_procs(family, timeout=LIMIT_S)
        output = started.output
    assert not alive and f"asked to stop: {reason}" in output, output
    assert output.count(" left\n") == 2 and "error:" not in output


def test_node_launcher_killed_leaves_no_orphans() -> None:
    """The `deepspeed` command itself returns 0 then, which only its makers can mend; the ranks end."""
    with start("deepspeed", [SCRIPT, "stuck"]) as started:
        started.wait_for("now stuck", LIMIT_S)
        ranks = [
            process
            for process in started.everything()
            if SCRIPT in process.cmdline() and process.children() == []
        ]
        node_launcher = next(
            process for process in started.everything() if "deepspeed.launcher.launch" in process.cmdline()
        )
        node_launcher.kill()
        _, alive = psutil.wait_procs(ranks, timeout=LIMIT_S)
        assert len(ranks) == 2 and not alive
        assert "launcher (process" in started.output


def test_taken_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = launch(
            "srun", [SCRIPT, "ok"], timeout_s=LIMIT_S, MASTER_PORT=port, SLURM_NTASKS="2", SLURM_PROCID="0"
        )
    assert set(ended.codes) == {1}
    assert f"cannot listen on 127.0.0.1:{port}" in ended.output and "Traceback" not in ended.output


def test_hub_ignores_strangers_and_refuses_a_second_rank() -> None:
    hub = Hub(RankEnv(0, 2, 0, 2, "127.0.0.1", 1, "plain"))
    hub.start()
    strangers = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
    strangers[1].sendall(b'{"rank": 0, "host": "x", "token": "wrong"}\n')
    strangers[2].close()
    ranks = [Channel(socket.create_connection(("127.0.0.1", hub.port), 10)) for _ in range(3)]
    for rank, channel in zip((0, 1, 1), ranks, strict=True):
        channel.send({"rank": rank, "host": "here", "token": hub.token})
    assert [channel.receive() for channel in ranks] == [[{"welcome": True}], [{"welcome": True}], None]
    for channel in ranks[:2]:
        channel.send({"done": True})
    assert [channel.receive() for channel in ranks[:2]] == [[{"leave": True}]] * 2
    hub.join(10)
    assert not hub.is_alive()


def test_clear_errors_prints_the_message_once_a_node(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for local_rank, text in (("0", "error: no text\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit) as caught, clear_errors():
            raise DataError("no text")
        assert caught.value.code == 1
        assert capfd.readouterr().err == text
    with pytest.raises(SystemExit) as caught, clear_errors():
        raise Stopped
    assert caught.value.code == 143
    with pytest.raises(ZeroDivisionError), clear_errors():
        raise ZeroDivisionError


def test_another_rank_tells_what_the_first_of_its_node_has_not_met() -> None:
    code = "import sys, time; from stack.dist.launcher import first_of_node_ends as ends\n"
    code += "if sys.argv[1] == '0': time.sleep(30)\nprint(ends(0.3), flush=True)"
    first = subprocess.Popen([sys.executable, "-c", code, "0"], env={**os.environ, "LOCAL_RANK": "0"})
    try:
        beside = [sys.executable, "-c", code, "1"]
        assert subprocess.run(beside, capture_output=True, text=True, check=True).stdout == "False\n"
    finally:
        first.kill()
    # Not waited for: a launcher may let an ended rank stand as a zombie.
    assert subprocess.run(beside, capture_output=True, text=True, check=True).stdout == "True\n"
    first.wait()


def test_description_names_the_rank_where_it_is_not_rank_0() -> None:
    first, second = (RankEnv(rank, 2, rank, 2, "127.0.0.1", 1, "plain") for rank in (0, 1))
    assert describe(DataError("no text"), first) == "error: no text"
    assert describe(DataError("no text"), second).startswith("error: no text\n(seen by rank 1 of 2 on ")
    assert describe(DataError("no text"), first, "in step 7").endswith(", in step 7)")
    assert "failed in the save behind step 7:" in describe(KeyError("x"), first, "in the save behind step 7")
    assert "rank 1 of 2" in describe(KeyError("x"), second) and "KeyError: 'x'" in describe(
        KeyError("x"), second
    )
