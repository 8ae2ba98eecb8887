"""Commands on emulated hosts (root only): what they see, how they end, and that nothing is left of them."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlplace.errors import InputError, MissingError, RlplaceError
from tests.tools.hosts.host_checks import left_behind, running
from tools.hosts import HostsSpec, cleanup, emulated_hosts, launch
from tools.hosts.__main__ import main
from tools.hosts.network import namespaces

pytestmark = pytest.mark.usefixtures("machine")

PYTHON = [sys.executable, "-I", "-S"]
FACTS = """
import json, os, socket, sys
facts = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
         "MASTER_ADDR", "PET_NNODES", "PET_NODE_RANK", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "EXTRA")}
facts |= {"host": socket.gethostname(), "cores": sorted(os.sched_getaffinity(0)),
          "cards": sorted(n for _, n in socket.if_nameindex()),
          "addresses": [socket.gethostbyname(f"host{i}") for i in range(2)],
          "session": os.getsid(0) == os.getpid()}
if os.environ["RANK"] == "0":
    server = socket.create_server(("host0", int(os.environ["MASTER_PORT"])))
    server.settimeout(20)
    print("ready", flush=True)
    other = server.accept()[0]
    facts["peer"] = other.recv(100).decode()
else:
    for attempt in range(2000):
        try:
            other = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10)
            break
        except ConnectionRefusedError:
            import time; time.sleep(0.01)
    other.sendall(socket.gethostname().encode())
facts["tcp"] = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b"\\0").decode()
print(json.dumps(facts), flush=True)
print("to standard error", file=sys.stderr)
"""
# Writes its pid, leaves a daemon in a session of its own that ignores SIGTERM, and goes on as the last argument says.
DAEMON = """
import os, signal, sys, time
folder, rank = sys.argv[1], os.environ.get("RANK", "0")
open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{folder}/pid-{rank}-daemon", "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(f"{folder}/pid-{rank}-daemon") or not open(f"{folder}/pid-{rank}-daemon").read():
    time.sleep(0.005)
print("started", flush=True)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def collect(lines):
    return lambda rank, host, stream, line: lines.append((rank, host, stream, line))


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_what_a_command_sees():
    lines = []
    core = min(os.sched_getaffinity(0))
    with emulated_hosts(HostsSpec(2, cpus=(core, core))) as hosts:
        assert [host.name for host in hosts.hosts] == ["host0", "host1"]
        with launch(hosts, [*PYTHON, "-c", FACTS], env={"EXTRA": "é"}, sink=collect(lines)) as job:
            assert job.wait(30) == (0, 0)
        job.check()
    facts = [json.loads(next(line for r, _, s, line in lines if r == rank and s == 1 and line != "ready")) for rank in (0, 1)]
    assert [f["host"] for f in facts] == ["host0", "host1"] and facts[0]["peer"] == "host1"
    assert all(f["cores"] == [core] and f["cards"] == ["eth0", "lo"] and f["EXTRA"] == "é" for f in facts)
    assert facts[0]["addresses"] == ["10.77.0.1", "10.77.0.2"] and facts[0]["session"]
    assert [(f["RANK"], f["LOCAL_RANK"], f["GROUP_RANK"], f["PET_NODE_RANK"]) for f in facts] == [tuple("0000"), tuple("1011")]
    assert all(f["WORLD_SIZE"] == f["PET_NNODES"] == "2" and f["MASTER_ADDR"] == "10.77.0.1" for f in facts)
    assert {f["tcp"] for f in facts} == {"reno"}  # whatever this machine's own
    assert (1, 1, 2, "to standard error") in lines
    with pytest.raises(InputError, match="have been removed"):
        launch(hosts, ["true"])


def test_a_failing_rank_ends_the_others_and_is_named(tmp_path):
    script = DAEMON + "while len(os.listdir(folder)) < 6: time.sleep(0.005)\n"
    script += "if rank == '1':\n    print('no memory left', file=sys.stderr); print('goodbye', flush=True); sys.exit(7)\n"
    script += "time.sleep(600)\n"
    with emulated_hosts(HostsSpec(3)) as hosts:
        with launch(hosts, [*PYTHON, "-c", script, str(tmp_path)], sink=collect([])) as job:
            assert job.wait(30) == (143, 7, 143)
            assert job.code == 7 and running(tmp_path) == []
            with pytest.raises(RlplaceError, match="rank 1 on host 1 ended with code 7: no memory left"):
                job.check()
        killed = launch(hosts, [*PYTHON, "-c", "import os\nif os.environ['RANK'] == '2': os.kill(os.getpid(), 9)"])
        killed.wait(30)
        with pytest.raises(RlplaceError, match="rank 2 on host 2 was killed"):
            killed.check()
    assert len(list(tmp_path.glob("pid*"))) == 6


def test_a_hanging_command_ends_with_the_timeout(tmp_path):
    with emulated_hosts(HostsSpec(2)) as hosts:
        job = launch(hosts, [*PYTHON, "-c", DAEMON + DEAF + "time.sleep(600)", str(tmp_path)], grace_s=0.2)
        wait_for(lambda: len(running(tmp_path)) == 4)
        with pytest.raises(RlplaceError, match=r"ranks 0, 1 still running after 0\.3 s"):
            job.wait(0.3)
        assert job.timed_out and job.poll() == (137, 137) and running(tmp_path) == []


def test_wrong_launches_are_refused():
    with emulated_hosts(HostsSpec(1)) as hosts:
        for command, options, message in (
            ("true", {}, "expected a list"),
            ([], {}, "expected a list"),
            ([""], {}, "no name"),
            (["a\0b"], {}, "not a string"),
            ([1], {}, "not a string"),
            (["true"], {"processes_per_host": 0}, "processes_per_host"),
            (["true"], {"processes_per_host": True}, "processes_per_host"),
            (["true"], {"grace_s": -1}, "grace_s"),
        ):
            with pytest.raises(InputError, match=message):
                launch(hosts, command, **options)


def test_what_cannot_run_says_so():
    with emulated_hosts(HostsSpec(1)) as hosts:
        with pytest.raises(RlplaceError, match="code 127: cannot run 'no-such-program': No such file"):
            with launch(hosts, ["no-such-program"], sink=collect([])) as job:
                job.wait(20)
                job.check()
        assert launch(hosts, ["/etc/passwd"], sink=collect([])).wait(20) == (126,)
    with pytest.raises(InputError, match="may not use core 4095"), emulated_hosts(HostsSpec(1, cpus=(4095,))):
        pass


def test_errors_in_the_block_remove_the_hosts(tmp_path):
    with pytest.raises(ZeroDivisionError), emulated_hosts(HostsSpec(2)) as hosts, emulated_hosts(HostsSpec(1)) as inner:
        assert hosts.hosts[0].namespace != inner.hosts[0].namespace
        launch(hosts, [*PYTHON, "-c", DAEMON + "time.sleep(600)", str(tmp_path)])
        wait_for(lambda: len(running(tmp_path)) == 4)
        _ = 1 // 0
    assert running(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_while_making_removes_what_there_is(monkeypatch):
    from tools.hosts import network

    monkeypatch.setattr(network, "_card", lambda *rest: "qdisc add dev eth0 root nonsense")
    with pytest.raises(MissingError, match="queueing disciplines"), emulated_hosts(HostsSpec(2)):
        pass


def test_from_another_thread():
    found = []

    def work():
        with emulated_hosts(HostsSpec(1)) as hosts:
            found.append(launch(hosts, ["true"]).wait(20))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [(0,)]


def test_a_sink_that_fails_ends_the_job():
    def sink(rank, host, stream, line):
        raise BrokenPipeError(line)

    with emulated_hosts(HostsSpec(1)) as hosts:
        job = launch(hosts, [*PYTHON, "-c", "import time\nprint('a', flush=True)\ntime.sleep(600)"], sink=sink)
        with pytest.raises(BrokenPipeError, match="a"):
            job.wait(30)


def test_the_script_hands_the_code_on(capfd):
    line = [
        "--hosts",
        "2",
        "--rate",
        "0,50mbit;200mbit,0",
        "--",
        "sh",
        "-c",
        "echo r$RANK; sleep $((RANK * 2)); exit $((RANK * 5))",
    ]
    assert main(line) == 5
    said = capfd.readouterr().out.splitlines()
    assert "[host 0] r0" in said and "[host 1] r1" in said
    assert main(["--hosts", "1", "--timeout", "0.3", "--", "sleep", "600"]) == 124
    assert "rank 0 still running after 0.3 s" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_signals_leave_nothing(tmp_path, number, code):
    script = [sys.executable, "-m", "tools.hosts", "--hosts", "2", "--"]
    started = subprocess.Popen(
        [*script, *PYTHON, "-c", DAEMON + "time.sleep(600)", str(tmp_path)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # also where the tests ignore it
    )
    try:
        wait_for(lambda: len(running(tmp_path)) == 4)
        assert len([name for name in namespaces() if name.startswith(f"rlplace-{started.pid}-")]) == 3
        started.send_signal(number)
        assert started.wait(30) == code
    finally:
        started.kill()
        started.wait()
    wait_for(lambda: running(tmp_path) == [])
    if number == signal.SIGKILL:
        cleanup()
    assert left_behind(started.pid) == []
