"""Agents: programs and functions that call the policy over HTTP, as an environment plays them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from endpoint_cases import FakeConversations, ScriptedPolicy, text_of

from stretto.environments.episode_faults import in_own_task
from stretto.environments.sandbox_processes import held_parts
from stretto.environments.task_options import AgentOptions, EndpointOptions, SandboxOptions
from stretto.environments.tasks import load_task
from stretto.errors import LateRewardError, RecipeError, RewardError, SuspendedError
from stretto.serve import agents
from stretto.serve.agents import AgentEnvironment, ModelAccess
from stretto.types import Prompt

PROMPT = Prompt(0, "2+2?", (1, 2, 3), {"prompt": "2+2?", "answer": "4"})

# A program that knows nothing of Stretto, and needs no package.
PROGRAM = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))

def ask(text):
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    made = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return made["choices"][0]["message"]["content"]

task = json.load(sys.stdin)
"""


class Characters:
    """A tokenizer: a token is a character."""

    def __len__(self) -> int:
        return 1_000

    def decode(self, tokens) -> str:
        return text_of(tokens)


def program(code: str, **options) -> AgentEnvironment:
    command = (sys.executable, "-I", "-S", "-c", PROGRAM + code)
    return environment(command=command, **options)


def environment(endpoint: EndpointOptions | None = None, **options) -> AgentEnvironment:
    return AgentEnvironment(
        Characters(), AgentOptions(path="unused.jsonl", **options), lambda prompt_tokens: FakeConversations(), endpoint
    )


def played(agent: AgentEnvironment, policy: ScriptedPolicy | None = None, prompt: Prompt = PROMPT) -> float:
    async def run():
        try:
            return await asyncio.wait_for(in_own_task(agent.episode(prompt, policy or ScriptedPolicy())), 60)
        finally:
            await agent.close()
            assert agent._sessions.num_open == 0

    return asyncio.run(run())


# -- programs ----------------------------------------------------------------------------------------------------------


def test_a_program_gets_its_task_and_its_exit_status_is_the_reward():
    policy = ScriptedPolicy()
    code = "assert task == {'prompt': '2+2?', 'answer': '4'}; sys.exit(ask(task['prompt']) != 'reply 0')"
    assert played(program(code), policy) == 1.0
    assert text_of(policy.rows[0][0]).startswith("<user>2+2?")
    assert played(program("ask('a'); sys.exit(7)")) == 0.0


def test_a_program_that_fails_by_an_exception_has_no_reward_and_is_named_once(caplog):
    agent = program("ask('2+2?'); task['nothing']")

    async def run():
        try:
            return [await agent.episode(PROMPT, ScriptedPolicy()) for _ in range(2)]
        finally:
            await agent.close()

    assert asyncio.run(run()) == [0.0, 0.0]
    (record,) = caplog.records
    assert "status 1, which is a reward of 0" in record.message
    assert "KeyError: 'nothing'" in record.message


def test_the_task_is_a_file_too_and_the_reward_may_be_one():
    code = """
assert json.load(open(os.environ["STRETTO_TASK_FILE"])) == task
ask("a")
open(os.environ["STRETTO_REWARD_FILE"], "w").write("0.25")
sys.exit(1)
"""
    assert played(program(code, reward="file")) == 0.25
    with pytest.raises(RewardError, match=r"status 3 and wrote no reward .*ends: oh no"):
        played(program("ask('a'); print('oh no', file=sys.stderr); sys.exit(3)", reward="file"))
    with pytest.raises(RewardError, match="wrote 'much'"):
        played(program("ask('a'); open(os.environ['STRETTO_REWARD_FILE'], 'w').write('much')", reward="file"))


def test_a_program_may_post_its_reward():
    code = "ask('a'); post(os.environ['STRETTO_SESSION_URL'] + '/reward', {'reward': 0.5}); sys.exit(9)"
    assert played(program(code, reward="posted")) == 0.5
    assert played(program(code)) == 0.5  # counts more than the exit status
    with pytest.raises(RewardError, match="has not posted its reward"):
        played(program("ask('a')", reward="posted"))


def test_a_program_that_posted_its_reward_and_stays_is_killed(monkeypatch):
    monkeypatch.setattr(agents, "GRACE_S", 0.0)
    code = (
        "ask('a'); post(os.environ['STRETTO_SESSION_URL'] + '/reward', {'reward': 0.5}); import time; time.sleep(600)"
    )
    assert played(program(code)) == 0.5


def test_a_reward_function_scores_what_a_program_prints():
    agent = program("ask('a'); print(task['answer'], end='')", reward="reward_functions:only_answer")
    assert played(agent) == 1.0
    with pytest.raises(RewardError, match=r"(?s)ended with status 1; its output ends: .*ZeroDivisionError"):
        played(program("ask('a'); 1/0", reward="reward_functions:only_answer"))


def test_a_program_sees_no_secret_but_those_that_are_passed(monkeypatch):
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("PASSED", "p")
    code = "ask('a'); assert 'SECRET' not in os.environ and os.environ['PASSED'] == 'p'"
    assert played(program(code, pass_env=("PASSED",))) == 1.0


def test_a_program_that_never_calls_the_model_is_a_failure():
    with pytest.raises(RewardError, match="status 0 and never called the model; its output ends: hello"):
        played(program("print('hello')"))


def test_a_program_whose_calls_are_all_refused_is_a_failure_also_if_it_does_not_mind():
    code = "\ntry:\n    ask('much')\nexcept Exception:\n    pass\n"
    with pytest.raises(RewardError, match=r"status 0 and has no answer of the model; .*no token fits"):
        played(program(code), ScriptedPolicy(max_context=3))


def test_a_task_with_half_of_a_character_reaches_the_program():
    prompt = Prompt(0, "2+2?", (1, 2, 3), {"prompt": "2+2?", "answer": "\udc80"})
    assert played(program("ask(task['prompt']); sys.exit(task['answer'] != '?')"), prompt=prompt) == 1.0


def test_a_program_that_fails_over_a_refused_call_says_which():
    with pytest.raises(RewardError, match=r"(?s)status 1 .*; its last call that was refused: .*no token fits"):
        played(program("ask('long ' * 99)", reward="file"), ScriptedPolicy(max_context=20))


def test_a_program_that_does_not_end_is_killed_at_its_deadline():
    with pytest.raises(LateRewardError, match=r"`task.seconds = 0\.5`"):
        played(program("import time; time.sleep(600)", seconds=0.5))


def test_an_agent_that_is_killed_at_its_deadline_may_have_a_reward():
    async def run():
        policy = ScriptedPolicy()
        agent = program("ask('a'); import time; time.sleep(600)", seconds=600.0, timeout_reward=-1.0)
        playing = asyncio.create_task(agent.episode(PROMPT, policy))
        await policy.started.acquire()
        (session,) = agent._sessions._by_key.values()
        session.end("deadline")  # as its timer does it
        assert await playing == -1.0
        await agent.close()

    asyncio.run(run())


def test_an_error_of_the_policy_kills_the_program_and_is_the_error_of_the_episode():
    code = """
try:
    ask("a")
finally:
    import time; time.sleep(600)
"""
    with pytest.raises(SuspendedError, match="it moves"):
        played(program(code), ScriptedPolicy(fault=SuspendedError("it moves")))


def test_an_episode_that_is_cancelled_leaves_no_program():
    async def run():
        policy = ScriptedPolicy(gate=asyncio.Event())
        agent = program("ask('a')")
        playing = asyncio.create_task(agent.episode(PROMPT, policy))
        await policy.started.acquire()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert agent._sessions.num_open == 0
        await agent.close()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_several_episodes_at_once_share_one_endpoint():
    async def run():
        agent = program("assert ask(task['prompt']) == task['prompt']")
        policies = [ScriptedPolicy(lambda _, context: context[len("<user>") :].partition("\n")[0]) for _ in range(4)]
        prompts = [Prompt(n, "", (1,), {"prompt": f"task {n}"}) for n in range(4)]
        rewards = await asyncio.gather(*map(agent.episode, prompts, policies))
        assert rewards == [1.0] * 4
        await agent.close()

    asyncio.run(run())


def test_the_openai_client_needs_nothing_but_its_environment(tmp_path: Path):
    (tmp_path / "agent.py").write_text(
        "import json, sys\n"
        "from openai import OpenAI\n"
        "task = json.load(sys.stdin)\n"
        "made = OpenAI().chat.completions.create(model='any', messages=[{'role': 'user', 'content': task['prompt']}])\n"
        "sys.exit(made.choices[0].message.content != task['answer'])\n"
    )
    agent = environment(command=("python", str(tmp_path / "agent.py")))
    assert played(agent, ScriptedPolicy(lambda number, context: "4")) == 1.0


# -- functions ---------------------------------------------------------------------------------------------------------


def ask(access: ModelAccess, text: str) -> str:
    body = json.dumps({"model": access.model, "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(f"{access.base_url}/chat/completions", body, {"x-api-key": access.api_key})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def solve(task, access):
    return float(ask(access, task["prompt"]) == "reply 0")


async def solve_async(task, access):
    return await asyncio.to_thread(solve, task, access)


def answers(task, access):
    ask(access, task["prompt"])
    return task["answer"]


def fails(task, access):
    raise KeyError("no such thing")


def leaves(task, access):
    sys.exit(3)


async def leaves_async(task, access):
    sys.exit(3)


async def cancels(task, access):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


def stops(task, access):
    return next(iter(()))


FUNCTIONS = (solve, solve_async, answers, fails, leaves, leaves_async, cancels, stops)


@pytest.fixture
def here(monkeypatch):
    module = type(sys)("agent_functions")
    vars(module).update({each.__name__: each for each in FUNCTIONS})
    monkeypatch.setitem(sys.modules, "agent_functions", module)


@pytest.mark.parametrize("name", ["solve", "solve_async"])
def test_a_function_is_an_agent_and_returns_its_reward(here, name):
    assert played(environment(function=f"agent_functions:{name}")) == 1.0


def test_a_function_may_return_a_text_that_is_scored(here):
    options = {"function": "agent_functions:answers"}
    assert played(environment(**options, reward="reward_functions:only_answer")) == 1.0
    with pytest.raises(RewardError, match="the agent returned '4': return its reward"):
        played(environment(**options))


def test_a_function_that_raises_fails_its_episode(here):
    with pytest.raises(RewardError, match=r"fails` raised `KeyError: 'no such thing' \(test_agents.py"):
        played(environment(function="agent_functions:fails"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leaves", "SystemExit: 3"),
        ("leaves_async", "SystemExit: 3"),
        ("cancels", "cancelled its own task"),
        ("stops", "StopIteration"),
    ],
)
def test_a_function_that_would_end_the_run_fails_its_episode_alone(here, name, said):
    with pytest.raises(RewardError, match=said):
        played(environment(function=f"agent_functions:{name}"))


# -- the task ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_endpoint_listens_where_the_recipe_says(host: str):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = f"http://127.0.0.1:{port}"
    code = f"assert os.environ['OPENAI_BASE_URL'] == '{where}/v1'; ask('a')"
    agent = program(code, endpoint=EndpointOptions(host=host, port=port))

    async def run():
        endpoint = await agent.start()
        try:
            assert endpoint.url == f"http://{host}:{port}"
            return await agent.episode(PROMPT, ScriptedPolicy())
        finally:
            await agent.close()

    assert asyncio.run(run()) == 1.0


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_agents_that_come_by_another_way_get_the_url_of_the_recipe(end: str):
    code = """
assert os.environ["OPENAI_BASE_URL"] == "https://proxy.example/run/v1", os.environ["OPENAI_BASE_URL"]
assert os.environ["ANTHROPIC_BASE_URL"] == "https://proxy.example/run"
assert os.environ["STRETTO_SESSION_URL"].startswith("https://proxy.example/run/sessions/")
sys.exit("here")
"""
    agent = program(code, endpoint=EndpointOptions(url=f"https://proxy.example/run{end}"))
    with pytest.raises(RewardError, match=r"never called the model.*here"):
        played(agent)


def test_a_recipe_gives_its_endpoint_to_its_agents(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}')
    told = EndpointOptions(port=8_123)
    task = load_task(AgentOptions(path=str(path), command=("true",)), num_evaluation=0, endpoint=told)
    assert task.environment.config["endpoint"] == told


def test_rows_are_tasks(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "b"}]
    rows = [{"prompt": "a", "answer": 1}, {"messages": messages, "answer": 2}]
    path.write_text("\n".join(map(json.dumps, rows)))
    task = load_task(AgentOptions(path=str(path), command=("true",)), num_evaluation=0)
    assert [dict(row.columns) for row in task.train] == rows
    assert [row.messages for row in task.train] == [({"role": "user", "content": "a"},), tuple(messages)]
    assert task.max_turns == 32
    assert task.environment.name == agents.AgentEnvironment.__module__ + ":AgentEnvironment"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "set `task.command"),
        ({"command": ("true",), "function": "a:b"}, "and not both"),
        ({"command": ("true",), "reward": "luck"}, "`task.reward = 'luck'` is none of"),
        ({"function": "a:b", "reward": "file"}, "is that of a program"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(RecipeError, match=said):
        load_task(AgentOptions(path="any.jsonl", **options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": ("no-such-program",)}, "`no-such-program`, which is no program"),
        ({"command": ("python", "agnet.py")}, "`task.command` names `agnet.py`, and there is no such file in"),
        ({"function": "nothing"}, "write `package.module:function`"),
        ({"function": "no_such_module:f"}, "there is no module"),
        ({"command": ("true",), "pass_env": ("NOT_SET_ANYWHERE",)}, "`NOT_SET_ANYWHERE`, which is not set"),
    ],
)
def test_agents_that_do_not_exist_are_refused_before_the_run(options, said):
    with pytest.raises(RecipeError, match=said):
        environment(**options)


def test_a_reward_function_that_does_not_exist_is_refused_before_the_run():
    agent = environment(command=("true",), reward="no_such_module:f")

    async def run():
        try:
            await agent.start()
        finally:
            await agent.close()

    with pytest.raises(RecipeError, match="no_such_module"):
        asyncio.run(run())


# -- in a sandbox ------------------------------------------------------------------------------------------------------

needs_namespaces = pytest.mark.skipif("processes" not in held_parts(), reason="no namespaces on this machine")


@needs_namespaces
def test_an_agent_in_a_sandbox_reaches_the_endpoint_and_nothing_else(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as service:
        service.bind(str(tmp_path / "service"))
        service.listen()
        code = f"""
import socket
found = [ask("2+2?") != ""]
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {other.getsockname()[1]})),
    (socket.AF_INET, ("192.0.2.1", 80)),
    (socket.AF_UNIX, {str(tmp_path / "service")!r}),
):
    try:
        socket.socket(family).connect(address)
        found.append(False)
    except OSError:
        found.append(True)
try:
    open({str(tmp_path / "file")!r}, "w")
    found.append(False)
except OSError:
    found.append(True)
open(os.environ["HOME"] + "/note.txt", "w").write("its own folder")
found.append(json.load(open(os.environ["STRETTO_TASK_FILE"])) == task and os.getcwd() == {os.getcwd()!r})
post(os.environ["STRETTO_SESSION_URL"] + "/reward", {{"reward": sum(found)}})
"""
        assert played(program(code, reward="posted", sandbox=SandboxOptions())) == 6.0


@needs_namespaces
def test_an_agent_in_a_sandbox_may_open_many_connections():
    code = """
import socket, time
address = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")[0].split(":")
held = []
for _ in range(250):
    held.append(socket.socket())
    held[-1].settimeout(5)
    held[-1].connect((address[0], int(address[1])))
for each in held:
    each.close()
for attempt in range(100):
    try:
        sys.exit(ask("2+2?") == "")
    except OSError:
        time.sleep(0.1)
sys.exit("no connection")
"""
    assert played(program(code, sandbox=SandboxOptions())) == 1.0


@needs_namespaces
def test_an_agent_in_a_sandbox_does_not_outlive_the_driver(tmp_path):
    marker = f"outlives-{os.getpid()}"
    code = f"""
import asyncio, sys
from stretto.environments.sandbox_processes import DEFAULT_LIMITS, sandbox_folder, sandboxed
from stretto.serve.programs import run_program
async def run():
    with sandbox_folder() as own:
        command = [*sandboxed(own, DEFAULT_LIMITS), sys.executable, "-c", "import time; time.sleep(600)", "{marker}"]
        await run_program(command, environment={{}}, input_text="")
asyncio.run(run())
"""
    driver = subprocess.Popen([sys.executable, "-c", code])
    try:
        while len(found := processes_with(marker)) < 4:  # the driver names it too; then three of the sandbox
            assert driver.poll() is None
            time.sleep(0.05)
    finally:
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + 30
    while processes_with(marker):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def processes_with(word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@needs_namespaces
def test_agents_in_sandboxes_do_not_disturb_each_other():
    agent = program('sys.exit(ask("2+2?") == "")', sandbox=SandboxOptions())

    async def run():
        try:
            return await asyncio.gather(*(agent.episode(PROMPT, ScriptedPolicy()) for _ in range(3)))
        finally:
            await agent.close()

    assert asyncio.run(run()) == [1.0] * 3


def test_a_sandbox_that_cannot_be_made_is_refused(monkeypatch):
    monkeypatch.setattr(agents, "held_parts", lambda limits: frozenset({"system calls", "network"}))
    with pytest.raises(RecipeError, match="needs namespaces"):
        played(program("ask('2+2?')", sandbox=SandboxOptions()))
    monkeypatch.setattr(agents, "held_parts", lambda limits: frozenset({"processes"}))
    with pytest.raises(RecipeError, match="has gaps"):
        played(program("ask('2+2?')", sandbox=SandboxOptions(strict=True)))


def test_a_sandbox_is_for_programs_whose_reward_is_no_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    same = {"path": str(tmp_path / "rows.jsonl"), "sandbox": SandboxOptions()}
    with pytest.raises(RecipeError, match="is for a program"):
        load_task(AgentOptions(function="a:b", **same))
    with pytest.raises(RecipeError, match="let the agent post"):
        load_task(AgentOptions(command=("python",), reward="file", **same))
