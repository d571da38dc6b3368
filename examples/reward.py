"""A reward function of your own, for `examples/capitals.jsonl`. From the repository's folder:

    [task]
    type = "file"
    path = "examples/capitals.jsonl"
    reward = "examples.reward:names_the_capital"

It is called with the prompt, the completion and the row's other columns, in a process of its own with a time limit.
`async def` works too, for rewards that ask a server.
"""


def names_the_capital(prompt: str, completion: str, *, answer: str, **row: object) -> float:
    """1 for the capital alone, less the more is said around it, 0 without it."""
    if answer.lower() not in completion.lower():
        return 0.0
    return max(0.2, len(answer) / len(completion.strip()))
