"""Example of a reward function, for `examples/capitals.jsonl`. Run from the repository's root:

    [task]
    type = "file"
    path = "examples/capitals.jsonl"
    reward = "examples.reward:names_the_capital"

It is called with the prompt, the completion and the row's other columns, in a separate process with a time limit.
It may be `async def`, for rewards that ask a server.
"""


def names_the_capital(prompt: str, completion: str, *, answer: str, **row: object) -> float:
    """Returns 1 for the capital alone, less the more text surrounds it, and 0 without it."""
    if answer.lower() not in completion.lower():
        return 0.0
    return max(0.2, len(answer) / len(completion.strip()))
