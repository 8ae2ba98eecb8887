"""``python -m tools.hosts --hosts 4 --rate 1gbit -- COMMAND ...``: runs a command on emulated hosts."""

from __future__ import annotations

import argparse
import sys

from rlplace.errors import InputError, RlplaceError
from tools.hosts.emulate import cleanup, emulated_hosts
from tools.hosts.launch import Job, launch
from tools.hosts.spec import HostsSpec, parse_cores, parse_rates

TIMEOUT_CODE = 124


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.hosts",
        description="Runs COMMAND on every one of several emulated hosts (root only), with the variables that torchrun sets.",
        epilog="Ends with 0, with the code of the rank that failed first, or with 124 when the time is up.",
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="how many (2)")
    parser.add_argument(
        "--rate", default="1gbit", help="of every host's card, or by pair as rows of a matrix: '0,50mbit;200mbit,0' (1gbit)"
    )
    parser.add_argument("--burst", type=int, metavar="BYTES", help="token bucket of a link (what its rate moves in 1 ms)")
    parser.add_argument("--cores", metavar="LIST", help="cores to pin the hosts to, one entry a host: 0,1 or 0-1,2-3")
    parser.add_argument("--processes-per-host", type=int, default=1, metavar="N", help="ranks on every host (1)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end everything after this long")
    parser.add_argument("--cleanup", action="store_true", help="only remove what killed processes left behind")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        return run(options)
    except RlplaceError as error:
        print(f"rlplace: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = None  # type: ignore[assignment]  # nobody reads; the interpreter must not flush it again
        return 1


def run(options: argparse.Namespace) -> int:
    """Makes the hosts, runs the command, removes the hosts."""
    if options.cleanup:
        for name in cleanup():
            print(f"removed {name}", file=sys.stderr)
        return 0
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise InputError("no command; write it after --, for example: -- python train.py")
    if options.timeout is not None and not 0 < options.timeout < 1e9:
        raise InputError(f"--timeout {options.timeout} is not a positive number of seconds")
    spec = HostsSpec(
        hosts=options.hosts,
        rate_bits_per_s=parse_rates(options.rate),
        burst_bytes=options.burst,
        cpus=None if options.cores is None else parse_cores(options.cores),
    )
    job: Job | None = None
    try:
        with emulated_hosts(spec) as hosts:
            job = launch(hosts, command, processes_per_host=options.processes_per_host)
            job.wait(options.timeout)
            return job.code
    except RlplaceError as error:
        if job is None or not job.timed_out:
            raise
        print(f"rlplace: {error}", file=sys.stderr)
        return TIMEOUT_CODE


if __name__ == "__main__":
    sys.exit(main())
