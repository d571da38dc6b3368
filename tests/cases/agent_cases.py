"""A program that is trained as it is, and the recipe of a small run of it."""

from __future__ import annotations

from pathlib import Path

from run_cases import small_recipe

from stretto.recipe.schema import Recipe

# Two turns of one chat, a call that does not train, and a sub-agent with a context of its own.
AGENT = """
import json, os, sys, urllib.error, urllib.request

def ask(messages, **more):
    body = json.dumps({"messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]

task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["prompt"]}]
said = ""
try:
    for _ in range(2):
        messages.append(ask(messages))
        said += messages[-1]["content"]
        messages.append({"role": "user", "content": "="})
    ask([{"role": "user", "content": "title"}], train=False)
    said += ask([{"role": "user", "content": "sub"}])["content"]
except urllib.error.HTTPError as error:
    if json.load(error)["error"]["code"] not in ("context_length_exceeded", "limit_reached"):
        raise
print(said)
"""


def agents(model: Path, folder: Path, *overrides: str) -> Recipe:
    """Three updates of 2 groups of 4 runs of the agent, whose turns end at a vowel or a digit."""
    (folder / "agent.py").write_text(AGENT)
    tables = """
        [task]
        type = "agent"
        path = "prompts.jsonl"
        command = ["python", "-I", "-S", "agent.py"]
        reward = "our_rewards:letters"
        turns = 4
        [rollout]
        prompts = 2
        max_tokens = 80
        stop = ["a", "e", "i", "o", "u", "1", "2", "3", "4"]
    """
    return small_recipe(model, folder, tables, *overrides)
