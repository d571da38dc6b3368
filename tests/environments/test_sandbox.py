"""The sandbox: what code in it is refused, and what is said where a kernel does not allow it."""

import asyncio
import json
import os
import pwd
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stretto.environments import sandbox, worker_child
from stretto.environments.reward_pool import RewardPool
from stretto.environments.sandbox import PARTS, Limits, missing
from stretto.environments.sandbox_processes import held_parts, run_in_sandbox
from stretto.errors import RecipeError, RewardError
from stretto.recipe.reading import parse_recipe
from stretto.setup import inputs

FOLDER = str(Path(__file__).parents[1] / "cases")
LIMITS = Limits(memory=1 << 30, disk=4 << 20, processes=32)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")


def needs(*parts):
    lacking = set(parts) - (held_parts(LIMITS) if sys.platform == "linux" else set())
    return pytest.mark.skipif(bool(lacking), reason=f"the kernel does not allow {sorted(lacking)}")


@pytest.fixture(autouse=True)
def _functions(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


@asynccontextmanager
async def pool(function="run", **options):
    it = RewardPool(f"sandbox_functions:{function}", **options)
    await it.start()
    try:
        yield it
    finally:
        await it.close()


def results(*codes, function="run", limits=LIMITS, row=None, **options):
    """What each code leaves in `result`, or the error of its reward."""

    async def run():
        async with pool(function, sandbox=limits, **options) as it:
            calls = (it.score("p", textwrap.dedent(code), row or {}) for code in codes)
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    return asyncio.run(run())


CONNECT = """
import socket
try:
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    result = 1
except PermissionError:
    result = 0
"""


@needs("network")
@pytest.mark.parametrize("function", ["run", "run_later"])
def test_code_cannot_connect_anywhere(function):
    with socket.create_server(("127.0.0.1", 0)) as server:
        row = {"port": server.getsockname()[1]}
        assert results(CONNECT, row=row, limits=None) == [1.0], "the test itself must be able to connect"
        assert results(CONNECT, row=row, function=function) == [0.0]


@needs("system calls")
def test_code_cannot_reach_a_service_of_this_machine(tmp_path):
    path = str(tmp_path / "service")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        code = """
            import socket
            try:
                socket.socket(socket.AF_UNIX).connect(path)
                result = 1
            except PermissionError:
                result = 0
        """
        assert results(code, row={"path": path}, limits=None) == [1.0]
        assert results(code, row={"path": path}) == [0.0]


@needs("home")
def test_code_sees_nothing_of_the_home_folder_but_what_it_needs():
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    secret = home / f"stretto-test-{os.getpid()}"
    secret.write_text("secret")
    code = "import os\nresult = os.path.exists(path)"
    try:
        assert results(code, row={"path": str(secret)}, limits=None) == [1.0]
        assert results(code, row={"path": str(secret)}) == [0.0]
        assert results(code, row={"path": sys.prefix}) == [1.0]
        assert results(code, row={"path": os.getcwd()}) == [1.0]
    finally:
        secret.unlink()


def test_code_sees_no_secret_in_its_environment(monkeypatch):
    monkeypatch.setenv("OUR_API_KEY", "secret")
    assert results("import os\nresult = 'OUR_API_KEY' in os.environ") == [0.0]
    assert results("", function="home_is_here") == [1.0]


@needs("processes")
def test_code_cannot_read_the_environment_of_another_process():
    code = """
        try:
            result = len(open(f"/proc/{pid}/environ", "rb").read())
        except OSError:
            result = 0
    """
    row = {"pid": os.getpid()}
    assert results(code, row=row, limits=None)[0] > 0
    assert results(code, row=row) == [0.0]


@needs("files")
def test_code_cannot_write_outside_of_its_folder(tmp_path):
    code = """
        try:
            open(path, "w").write("x")
            result = 1
        except OSError:
            result = 0
    """
    outside = tmp_path / "written"
    assert results(code, row={"path": str(outside)}) == [0.0]
    assert not outside.exists()
    assert results(code, row={"path": "here"}) == [1.0]
    assert results(code, row={"path": str(outside)}, limits=None) == [1.0]


@needs("files")
def test_code_cannot_make_its_file_system_writable_again(tmp_path):
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None)
        libc.mount(None, b"/", None, 32, None)  # remount, read-write
        libc.umount2(os.getcwd().encode(), 2)
        try:
            open(path, "w").write("x")
            result = 1
        except OSError:
            result = 0
    """
    assert results(code, row={"path": str(tmp_path / "written")}) == [0.0]


@needs("files")
def test_code_has_no_devices_but_harmless_ones():
    code = """
        import multiprocessing, os
        kinds = {"null", "zero", "full", "random", "urandom", "fd", "stdin", "stdout", "stderr", "shm"}
        open("/dev/null", "w").write("x")
        assert open("/dev/urandom", "rb").read(4)
        multiprocessing.Semaphore()  # in shared memory
        result = len(set(os.listdir("/dev")) - kinds)
    """
    assert results(code) == [0.0]


@needs("files")
def test_code_cannot_fill_the_disk():
    code = """
        try:
            for name in "abc":
                open(name, "wb").write(bytes(3 << 20))
            result = 1
        except OSError:
            result = 0
    """
    assert results(code) == [0.0]


@needs("memory")
def test_code_that_takes_too_much_memory_fails_alone():
    failed, fine = results("result = len(bytearray(2 << 30))", "result = 1")
    assert isinstance(failed, RewardError)
    assert "MemoryError" in str(failed)
    assert fine == 1.0


@needs("process count")
def test_code_that_forks_without_end_is_bounded():
    code = """
        import os, time
        result = 0
        try:
            while result < 1000:
                if os.fork() == 0:
                    time.sleep(600)
                    os._exit(0)
                result += 1
        except OSError:
            pass
    """
    (started,) = results(code)
    assert 0 < started <= LIMITS.processes + (300 if os.getuid() == 0 else 0)


@needs("process count")
def test_code_may_start_any_number_of_processes_one_after_another():
    code = """
        import os
        result = 0
        while result < 400:
            if os.fork() == 0:
                os._exit(0)
            os.wait()
            result += 1
    """
    assert results(code) == [400.0]


@needs("processes")
def test_a_process_that_code_has_started_ends_with_its_worker():
    name = f"stretto-test-{os.getpid()}"
    code = """
        import os, subprocess, sys
        ready, here = os.pipe()
        program = f"import os, time; os.write({here}, b'1'); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", program, name], start_new_session=True, pass_fds=[here])
        os.read(ready, 1)
        result = 1
    """

    async def run():
        async with pool(sandbox=LIMITS) as it:
            assert await asyncio.wait_for(it.score("p", textwrap.dedent(code), {"name": name}), 60) == 1.0
            assert running(name)

    asyncio.run(run())
    for _ in range(600):
        if not running(name):
            return
        subprocess.run(["sleep", "0.1"], check=True)
    pytest.fail("it still runs")


def running(name):
    """True if a process of this machine has `name` in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue  # it has ended
    return False


def test_a_child_ends_with_its_parent_even_if_that_ends_first(tmp_path):
    code = """
import os, time
from pathlib import Path
from stretto.environments import sandbox
parent, call = os.getpid(), sandbox._call

def late(*words):
    Path("began").write_text(str(os.getpid()))
    while os.getppid() == parent:
        time.sleep(0.01)
    call(*words)

sandbox._call = late
sandbox._continue_in_child(ends_with_parent=True)
Path("outlived").write_text("")
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    began = tmp_path / "began"
    while not began.exists() or not began.read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    child = Path(f"/proc/{began.read_text()}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert not (tmp_path / "outlived").exists()


def test_a_sandbox_whose_parent_is_gone_is_not_entered(tmp_path):
    (options,) = sandbox.arguments(str(tmp_path), LIMITS)
    others = json.dumps(json.loads(options) | {"parent": 0})
    for given, status in ((options, 0), (others, 1)):
        command = [sys.executable, "-I", "-S", sandbox.__file__, given]
        assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == status


def test_a_reward_that_hangs_in_a_sandbox_is_killed():
    (hangs,) = results("import time\ntime.sleep(600)", deadline_s=1.0)
    assert "did not return within `task.reward_seconds = 1`" in str(hangs)


def test_a_reward_that_dies_in_a_sandbox_fails_alone():
    dies, fine = results("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "result = 0.5")
    assert "was ended by SIGSEGV while it scored this completion" in str(dies)
    assert fine == 0.5


def test_no_folder_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert results("open('a', 'w').write('x')\nresult = 1") == [1.0]
    assert list(tmp_path.iterdir()) == []


# -- where the kernel refuses a part -----------------------------------------------------------------------------------


def test_without_namespaces_the_other_parts_still_hold(tmp_path):
    code = """
        import socket
        from stretto.environments import sandbox
        def refused(folder, limits):
            raise PermissionError("no namespaces here")
        sandbox._isolate = refused
        held = sandbox.enter(folder, sandbox.Limits(1 << 30, 1 << 20, 32))
        assert {"memory", "file size"} <= held, held
        assert not {"files", "processes", "process count"} & held, held
        if "system calls" in held:
            try:
                socket.socket()
                raise SystemExit("it has a socket")
            except PermissionError:
                pass
        try:
            bytearray(2 << 30)
            raise SystemExit("it has the memory")
        except MemoryError:
            pass
        try:
            open("large", "wb").write(bytes(2 << 20))
            raise SystemExit("it has the file")
        except OSError:
            pass
    """
    program = f"folder = {str(tmp_path)!r}\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_strict_sandbox_with_gaps_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "enter", lambda folder, limits: frozenset(PARTS) - {"files"})
    assert worker_child.enter_sandbox("", LIMITS, strict=False) is None
    assert "the sandbox has gaps: it can write files wherever your user can" in str(
        worker_child.enter_sandbox("", LIMITS, strict=True)
    )
    monkeypatch.setattr(sandbox, "enter", lambda folder, limits: frozenset(PARTS))
    assert worker_child.enter_sandbox("", LIMITS, strict=True) is None


def recipe(**task):
    return parse_recipe({"model": {"path": "tiny"}, "task": {"type": "countdown-chain", **task}})


def test_check_says_which_parts_hold_and_what_is_open(monkeypatch):
    assert list(inputs._sandbox_notes(recipe())) == []
    monkeypatch.setattr(inputs, "held_parts", lambda limits: frozenset(PARTS) - {"network", "files"})
    said = list(inputs._sandbox_notes(recipe(sandbox={})))
    assert said[0].endswith(
        f"these parts hold: {', '.join(part for part in PARTS if part not in ('network', 'files'))}"
    )
    assert [line.partition("gap: ")[2] for line in said[1:3]] == missing(frozenset(PARTS) - {"network", "files"})
    assert "does not keep code from reading" in said[-1]


@pytest.mark.parametrize(("user", "is_said"), [(0, True), (1000, False)])
def test_check_says_that_root_gets_more_processes(monkeypatch, user, is_said):
    monkeypatch.setattr(inputs, "held_parts", lambda limits: frozenset(PARTS))
    monkeypatch.setattr(inputs.os, "getuid", lambda: user)
    said = "\n".join(inputs._sandbox_notes(recipe(sandbox={"processes": 64})))
    assert (
        "`task.sandbox.processes = 64` is not exact on this machine: code in the sandbox may have up to 364 processes"
        in said
    ) == is_said


def test_a_sandbox_has_limits_and_no_secrets():
    made = recipe(sandbox={"memory_gib": 0.5, "disk_mib": 2, "processes": 9})
    assert made.task.sandbox.limits == Limits(512 << 20, 2 << 20, 9)
    with pytest.raises(RecipeError, match=r"`task\.pass_env = \[\"KEY\"\]` would hand these variables to the code in"):
        recipe(sandbox={}, pass_env=["KEY"])


# -- tools -------------------------------------------------------------------------------------------------------------


def run(code, **options):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return asyncio.run(run_in_sandbox(command, limits=LIMITS, strict=False, **options))


def test_a_tool_runs_a_command_and_gets_what_it_prints():
    done = run("import sys; print(sys.stdin.read().upper()); sys.exit(3)", input_text="hello", seconds=60)
    assert (done.code, done.output) == (3, "HELLO\n")


def test_a_command_is_killed_at_its_deadline():
    done = run("import time; print('begun', flush=True); time.sleep(600)", seconds=0.5)
    assert done.code is None


@needs("network")
def test_a_command_has_no_network():
    done = run("import socket; socket.create_connection(('127.0.0.1', 1))", seconds=60)
    assert done.code == 1
    assert "PermissionError" in done.output


def test_a_tool_refuses_a_machine_with_gaps(monkeypatch):
    monkeypatch.setattr("stretto.environments.sandbox_processes.held_parts", lambda limits: frozenset({"memory"}))
    with pytest.raises(RewardError, match="the sandbox has gaps on this machine: it can use the network; "):
        asyncio.run(run_in_sandbox(["true"], limits=LIMITS))
