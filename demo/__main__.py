# SPDX-License-Identifier: Apache-2.0
"""``python -m demo up | down | status``, and the pieces that molecule uses: ``box``, ``model``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from gpubox.errors import GpuboxError

from . import ROOT, box, image, lock, model, report, settings, site
from .console import Console, error
from .engine import Podman

NAME = "gpubox-demo"


def up(chosen: settings.Settings, console: Console, *, expect_unchanged: bool) -> None:
    """From whatever is there to a served model."""
    with lock.alone(chosen.cache / "demo.lock", "another `make demo` or `make demo-down`"):
        podman = Podman.here(chosen.cache)
        identity = image.ensure(podman, chosen.suite, chosen.cache, console)
        wanted = box.spec(NAME, identity, chosen, chosen.port)
        if box.ensure(podman, wanted, console) == "keep":
            ended = box.end_leftovers(podman, NAME)
            if ended:
                console.say(f"    ended {ended} processes of an interrupted run in {NAME}")
        with console.step("a tiny GLM-5 as GGUF shards on the box"):
            copied = model.put(podman, NAME, model.write(chosen.cache))
            console.say("    written" if copied else "    already there, checksums agree")
        recap = site.play(chosen, NAME, console)
        found = report.read(podman, NAME)
        served = report.served_models(chosen.port)
        if found["model"] not in served:
            raise GpuboxError(
                f"port {chosen.port} serves {', '.join(served)}",
                f"the model {found['model']}",
                "run `make demo` again",
            )
        console.say(f"\n{report.summary(found, NAME, chosen.port, str(site.LOG))}\n")
        console.say(f"site.yml: ok={recap.ok} changed={recap.changed}, all in {console.total()}")
        if expect_unchanged and recap.changed:
            raise GpuboxError(
                f"site.yml changed {recap.changed} tasks' state on a box that was finished",
                "changed=0",
                f"look for `changed:` in {site.LOG}",
            )


def down(chosen: settings.Settings, console: Console, *, keep_cache: bool) -> None:
    """Remove what ``up`` made."""
    with lock.alone(chosen.cache / "demo.lock", "another `make demo` or `make demo-down`"):
        podman = Podman.here(chosen.cache)
        removed: list[str] = []
        kept: list[str] = []
        with console.step(f"removing {NAME}"):
            if box.remove(podman, NAME):
                removed.append(f"container {NAME}")
            if not keep_cache:
                gone, kept = image.remove(podman, settings.SUITES, chosen.cache)
                removed += [f"image {name}" for name in gone]
                if podman.run("volume", "exists", box.CACHE_VOLUME).code == 0:
                    if podman.run("volume", "rm", box.CACHE_VOLUME).code == 0:
                        removed.append(f"volume {box.CACHE_VOLUME} (downloaded packages)")
                    else:
                        kept.append(box.CACHE_VOLUME)
        for line in removed or ["nothing was there"]:
            console.say(f"    {line}")
    if not keep_cache:
        # the lock's own file included: nobody waits for it, a second run is refused
        shutil.rmtree(chosen.cache, ignore_errors=True)
        console.say(f"    directory {chosen.cache}")
        if kept:
            console.say(f"    left, because other containers use it: {', '.join(kept)}")
    console.say(
        f"Untouched: {ROOT / '.venv'} and {ROOT / '.cache'} (the toolchain), system packages."
    )


def status(chosen: settings.Settings, console: Console) -> None:
    """Say what is there, or that it is being made or removed."""
    if busy := lock.holder(chosen.cache / "demo.lock"):
        console.say(
            f"{NAME}: `make demo` or `make demo-down` is at work (PID {busy}); what Ansible does "
            f"stands in {site.LOG}"
        )
        return
    podman = Podman.here(chosen.cache)
    found = box.inspect(podman, NAME)
    if found is None:
        console.say(f"{NAME}: not there; `make demo` makes it")
        return
    box.require_ours(NAME, found)
    state = found["State"]["Status"]
    console.say(f"{NAME}: {state}")
    if state == "running":
        published = found["HostConfig"]["PortBindings"] or {}
        ports = [entry["HostPort"] for entries in published.values() for entry in entries]
        console.say(report.summary(report.read(podman, NAME), NAME, int(ports[0]), str(site.LOG)))


def box_create(chosen: settings.Settings, console: Console, name: str) -> None:
    """A box for a test scenario: the demo's, without a published port."""
    podman = Podman.here(chosen.cache)
    identity = image.ensure(podman, chosen.suite, chosen.cache, console)
    box.ensure(podman, box.spec(name, identity, chosen, None), console)


def box_remove(chosen: settings.Settings, console: Console, name: str) -> None:
    """Remove a box of a test scenario."""
    if box.remove(Podman.here(chosen.cache), name):
        console.say(f"removed {name}")


def put_model(chosen: settings.Settings, console: Console, name: str) -> None:
    """Put the tiny model on a box."""
    podman = Podman.here(chosen.cache)
    with lock.in_turn(chosen.cache / "model.lock"):
        source = model.write(chosen.cache)
    console.say("copied" if model.put(podman, name, source) else "already there")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("up", help="from nothing to a served model")
    make.add_argument(
        "--expect-unchanged", action="store_true", help="fail if site.yml changes any"
    )
    remove = commands.add_parser("down", help="remove everything that up made")
    remove.add_argument("--keep-cache", action="store_true", help="keep images and downloads")
    commands.add_parser("status", help="what is there")
    for name, text in (
        ("create", "make a box"),
        ("remove", "remove it"),
        ("model", "give it shards"),
    ):
        one = commands.add_parser(f"box-{name}", help=f"{text} (for molecule)")
        one.add_argument("--name", required=True)
        one.add_argument("--suite", choices=settings.SUITES)
    return parser.parse_args(arguments)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(arguments: list[str]) -> int:
    """Run one command; the exit status."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    try:
        variables = dict(os.environ)
        if getattr(options, "suite", None):
            variables["DEMO_SUITE"] = options.suite
        chosen = settings.read(variables, Path.home())
        actions: dict[str, Callable[[], None]] = {
            "up": lambda: up(chosen, console, expect_unchanged=options.expect_unchanged),
            "down": lambda: down(chosen, console, keep_cache=options.keep_cache),
            "status": lambda: status(chosen, console),
            "box-create": lambda: box_create(chosen, console, options.name),
            "box-remove": lambda: box_remove(chosen, console, options.name),
            "box-model": lambda: put_model(chosen, console, options.name),
        }
        actions[options.command]()
    except GpuboxError as problem:
        error(f"\n{problem}")
        return 1
    except BrokenPipeError:
        if options.command != "status":  # the others have work to do, and fail
            raise
        # who read has read enough; what is left in the buffer is flushed at the end, to nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        where = f" in: {console.current}" if console.current else ""
        error(
            f"\nstopped after {console.total()}{where}\ndo: run it again, it continues from there"
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
