# SPDX-License-Identifier: Apache-2.0
"""The unit, what it runs and what it answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.serving

# Runs on the box with its own python3 (3.11 or newer), so that a loopback address is the box's.
_ASK = """
import json, sys, urllib.request
url, body = sys.argv[1], sys.argv[2]
request = urllib.request.Request(url, body.encode() or None, {"Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
with opener.open(request, timeout=120) as answer:
    print(answer.read().decode())
"""


def ask(host: Any, serving: dict[str, Any], path: str, body: dict[str, Any] | None = None) -> Any:
    url = f"http://{serving['address']}:{serving['port']}{path}"
    text = json.dumps(body) if body is not None else ""
    return json.loads(host.check_output("python3 -c %s %s %s", _ASK, url, text))


def show(host: Any, serving: dict[str, Any], name: str) -> str:
    return str(host.check_output("systemctl show -p %s --value %s", name, serving["unit"]))


@pytest.fixture(scope="module")
def main_pid(host: Any, serving: dict[str, Any]) -> str:
    pid = show(host, serving, "MainPID")
    assert int(pid) > 1
    return pid


@pytest.fixture(scope="module")
def current(host: Any, serving: dict[str, Any]) -> str:
    return str(host.check_output("readlink -f %s", f"{serving['root']}/current"))


def variables(host: Any, pid: str) -> dict[str, str]:
    text = host.check_output("tr '\\0' '\\n' < /proc/%s/environ", pid)
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


def test_the_unit_is_enabled_and_running(host: Any, serving: dict[str, Any]) -> None:
    service = host.service(serving["unit"])
    assert service.is_enabled
    assert service.is_running


def test_the_server_runs_as_the_service_user(
    host: Any, serving: dict[str, Any], main_pid: str
) -> None:
    assert host.check_output("stat -c %%U /proc/%s", main_pid) == serving["user"]
    account = host.user(serving["user"])
    assert account.shell == "/usr/sbin/nologin"
    assert account.uid < 1000


def test_only_the_wanted_address_is_listened_on(host: Any, serving: dict[str, Any]) -> None:
    table = host.check_output("ss -Hltn sport = :%s", str(serving["port"]))
    addresses = {line.split()[3] for line in table.splitlines()}
    assert addresses == {f"{serving['address']}:{serving['port']}"}


def test_the_unit_file_is_the_release_s(host: Any, serving: dict[str, Any], current: str) -> None:
    installed = host.file(f"/etc/systemd/system/{serving['unit']}")
    assert (installed.user, installed.group, installed.mode) == ("root", "root", 0o644)
    assert installed.content == host.file(f"{current}/{serving['unit']}").content
    assert show(host, serving, "NeedDaemonReload") == "no"


def test_current_points_into_the_releases(host: Any, serving: dict[str, Any], current: str) -> None:
    link = host.file(f"{serving['root']}/current")
    assert link.is_symlink
    assert re.fullmatch(re.escape(serving["root"]) + r"/releases/[0-9a-f]{16}", current)


def test_what_runs_was_started_from_the_current_release(
    host: Any, main_pid: str, current: str
) -> None:
    assert variables(host, main_pid)["GPUBOX_RELEASE"] == current.rpartition("/")[2]


def test_the_model_answers_by_its_name(host: Any, serving: dict[str, Any]) -> None:
    listed = ask(host, serving, "/v1/models")
    assert [entry["id"] for entry in listed["data"]] == [serving["model"]]
    body = {"model": serving["model"], "prompt": "the quick brown fox", "temperature": 0}
    answers = [ask(host, serving, "/v1/completions", body | {"max_tokens": 8}) for _ in range(2)]
    assert answers[0]["usage"]["completion_tokens"] == 8
    assert answers[0]["choices"][0]["text"] != ""
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


def test_the_report_tells_what_was_measured(
    host: Any, serving: dict[str, Any], current: str
) -> None:
    report = json.loads(host.file(f"{current}/report.json").content_string)
    assert report["model"] == serving["model"]
    assert report["unit"] == serving["unit"]
    assert report["release"] == current.rpartition("/")[2]
    assert report["address"] == f"http://{serving['address']}:{serving['port']}"
    assert report["text"] != ""
    assert report["tokens_per_second"] > 0
    assert report["time_to_first_token_seconds"] > 0


def test_the_plan_is_remembered_as_applied(host: Any, current: str) -> None:
    plan = json.loads(host.file(f"{current}/plan.json").content_string)
    assert plan["faults"] == []
    assert plan["tensor_parallel_size"] >= 1
    assert plan["max_model_len"] > 0
    unit = host.file(f"{current}/vllm-glm5.service").content_string
    assert f'"--max-model-len" "{plan["max_model_len"]}"' in unit
    assert f"TimeoutStartSec={plan['limits']['start_timeout_seconds'] + 30}\n" in unit


def test_the_journal_has_no_traceback(host: Any, serving: dict[str, Any]) -> None:
    """Of the running invocation only: an operator may have killed the one before."""
    identity = show(host, serving, "InvocationID")
    text = host.check_output("journalctl --no-pager -o cat _SYSTEMD_INVOCATION_ID=%s", identity)
    assert "Application startup complete" in text
    assert [line for line in text.splitlines() if "Traceback (most recent call" in line] == []


def environment(host: Any, main_pid: str) -> str:
    """Directory of the environment that the server runs from."""
    path = variables(host, main_pid)["PATH"].split(":")[0]
    assert path.endswith("/venv/bin")
    return path.removesuffix("/venv/bin")


def test_the_environment_is_complete_and_of_its_own(host: Any, main_pid: str) -> None:
    root = environment(host, main_pid)
    assert host.file(f"{root}/environment.json").is_file
    packages = host.check_output("echo %s/venv/lib/python3*/site-packages", root)
    # a hard link into uv's cache would have the cache patched too
    linked = host.check_output("find %s/vllm_gguf_plugin -name '*.py' -links +1", packages)
    assert linked == ""


def test_what_breaks_the_stack_is_not_installed(
    host: Any, serving: dict[str, Any], main_pid: str
) -> None:
    root = environment(host, main_pid)
    names = " ".join(f"{root}/venv/lib/python3*/site-packages/{name}" for name in serving["absent"])
    assert host.run(f"ls -d {names} 2>/dev/null").stdout == ""


def test_every_patched_file_is_as_its_series_says(host: Any, main_pid: str) -> None:
    """From the patches beside the environment: each file has the hash after the last one."""
    root = environment(host, main_pid)
    packages = host.check_output("echo %s/venv/lib/python3*/site-packages", root)
    found = host.check_output("find %s/patches -name series.yml", root).split()
    assert found
    entries = [
        entry
        for path in found
        for patch in yaml.safe_load(host.file(path).content_string)["patches"]
        for entry in patch["files"]
    ]
    # whatever the order of the series: the last hash of a file is the one no patch starts from
    starts = {(entry["path"], entry["before"]) for entry in entries}
    last = [entry for entry in entries if (entry["path"], entry["after"]) not in starts]
    wanted = {entry["path"]: entry["after"] for entry in last}
    assert len(last) == len(wanted)
    measured = {}
    for path in wanted:
        file = host.file(f"{packages}/{path}")
        measured[path] = file.sha256sum if file.exists else None
    assert measured == wanted
